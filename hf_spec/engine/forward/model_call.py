"""How a model's forward is called, whatever it names its arguments, and what is read from it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import output_capturing

from hf_spec.common.compat import cache_argument
from hf_spec.engine.forward.last_layer import BEFORE_NORM, LastLayer
from hf_spec.engine.forward.vocabulary import fit_logits, fit_tokens, num_embeddings
from hf_spec.engine.models import internal_positions as own_positions
from hf_spec.engine.models.cross_attention import CrossAttention, takes_positions

# Older transformers count the layers of a list otherwise, and not from the end; they return all.
SELECTS_LAYERS = hasattr(output_capturing, "selected_hidden_states")


class ModelCall:
    """The forward of one model.

    Args:
        model: a causal language model, or an encoder-decoder of which it calls the decoder.
        hidden_layers: see `ModelRunner`.
        vocab_size: see `ModelRunner`.

    Attributes:
        cross_attention: what a decoder is called with beside its tokens; None for others.
        vocab_size: V of tokens and logits outside of the model.
    """

    def __init__(
        self, model: PreTrainedModel, hidden_layers: Sequence[int], vocab_size: int | None
    ):
        self.cross_attention: CrossAttention | None = None
        self.hidden_layers = tuple(hidden_layers)
        self._model = model
        self._last = LastLayer(model) if BEFORE_NORM in self.hidden_layers else None
        self._own_size = num_embeddings(model)
        self.vocab_size = vocab_size or self._own_size
        self._keeps_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._takes_positions = takes_positions(model)
        selected = [layer for layer in self.hidden_layers if layer != BEFORE_NORM]
        self._always: dict[str, Any] = {"return_dict": True}
        if selected:
            self._always["output_hidden_states"] = selected if SELECTS_LAYERS else True

    def active(self) -> AbstractContextManager[None]:
        """Make the model ready to be told positions; it is as before after the block."""
        return own_positions.active(self._model)

    def plainly(self, inputs: Mapping[str, Any]) -> Any:
        """The result for arguments as plain `generate()` gives them."""
        with self._watched():
            return self._model(**inputs, **self._always)

    def __call__(
        self,
        tokens: Tensor,
        embeddings: Tensor | None,
        positions: Tensor,
        mask: Tensor,
        logits_to_keep: Tensor | int,
        cache: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The result for (B, T) tokens, or their embeddings, at (B, T) positions.

        Models that do not know `logits_to_keep` give those of all tokens, see `kept`.
        """
        if self._takes_positions:
            kwargs["position_ids"] = positions
        if self._keeps_logits:
            kwargs["logits_to_keep"] = logits_to_keep
        kwargs["attention_mask"] = mask
        if cache is not None:
            kwargs |= cache_argument(self._model.forward, cache)
        if embeddings is None:
            small = self._own_size < self.vocab_size
            kwargs["input_ids"] = fit_tokens(tokens, self._own_size) if small else tokens
        else:
            kwargs["inputs_embeds"] = embeddings
        kwargs |= self._always
        if self.cross_attention is not None:
            kwargs = self.cross_attention.arguments(kwargs)
        with own_positions.told(positions), self._watched():
            return self._model(**kwargs)

    def kept(self, result: Any, kept: Tensor) -> Tensor:
        """(M, V) logits of the tokens to keep of a call with one line of tokens."""
        logits: Tensor = result.logits[0]
        return logits if self._keeps_logits else logits[kept]

    def fitted(self, logits: Tensor) -> Tensor:
        """Logits of the vocabulary outside of the model."""
        if self._own_size == self.vocab_size:
            return logits
        return fit_logits(logits, self.vocab_size)

    def hidden(self, result: Any) -> list[Tensor]:
        """(B * T, hidden size) of each of the hidden layers."""
        return [self._states(result, layer).flatten(0, 1) for layer in self.hidden_layers]

    def _watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self._last is None else self._last.watched()

    def _states(self, result: Any, layer: int) -> Tensor:
        if self._last is not None and layer == BEFORE_NORM:
            return self._last.take()
        # Beside those of an encoder they have another name.
        states = getattr(result, "decoder_hidden_states", None) or result.hidden_states
        found: Tensor = states[layer]
        return found
