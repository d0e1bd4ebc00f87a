"""Calls a model's forward under the argument names that it has, and reads its results."""

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
from hf_spec.engine.models import internal_positions
from hf_spec.engine.models.cross_attention import CrossAttention, takes_positions

# Older transformers number the layers of a list differently and not from the end; they return all.
SELECTS_LAYERS = hasattr(output_capturing, "selected_hidden_states")


class ModelCall:
    """The forward pass of one model; for the arguments see `ModelRunner`.

    Attributes:
        cross_attention: additional arguments of a decoder that attends to an encoder, or None.
        vocab_size: V of tokens and logits outside of the model.
    """

    def __init__(
        self, model: PreTrainedModel, hidden_layers: Sequence[int], vocab_size: int | None
    ):
        self.cross_attention: CrossAttention | None = None
        self.hidden_layers = tuple(hidden_layers)
        self._model = model
        self._last = LastLayer(model) if BEFORE_NORM in self.hidden_layers else None
        self._model_vocab_size = num_embeddings(model)
        self.vocab_size = vocab_size or self._model_vocab_size
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._is_spread = len(set(getattr(model, "hf_device_map", {}).values())) > 1
        self._takes_positions = takes_positions(model)
        selected = [layer for layer in self.hidden_layers if layer != BEFORE_NORM]
        self._always: dict[str, Any] = {"return_dict": True}
        if "output_router_logits" in parameters:
            # Their loss, which a config may turn on, needs a mask entry per token of the sequence.
            self._always["output_router_logits"] = False
        if selected:
            self._always["output_hidden_states"] = selected if SELECTS_LAYERS else True

    def active(self) -> AbstractContextManager[None]:
        """Prepare the model for explicit positions; restore it when the block ends."""
        return internal_positions.active(self._model)

    def prefill(self, inputs: Mapping[str, Any]) -> Any:
        """Call the model with the arguments of plain `generate()`."""
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
        """Call the model with (B, T) tokens, or their embeddings, at (B, T) position ids.

        Models without `logits_to_keep` return the logits of all tokens, see `logits_of`.
        """
        if self._takes_positions:
            kwargs["position_ids"] = positions
        if self._keeps_logits:
            # On several devices the states to index may be on another one than the inputs, to which
            # hooks move tensors; a list is moved by none.
            if self._is_spread and isinstance(logits_to_keep, Tensor):
                kwargs["logits_to_keep"] = logits_to_keep.tolist()
            else:
                kwargs["logits_to_keep"] = logits_to_keep
        kwargs["attention_mask"] = mask
        if cache is not None:
            kwargs |= cache_argument(self._model.forward, cache)
        if embeddings is None:
            size = self._model_vocab_size
            kwargs["input_ids"] = fit_tokens(tokens, size) if size < self.vocab_size else tokens
        else:
            kwargs["inputs_embeds"] = embeddings
        kwargs |= self._always
        if self.cross_attention is not None:
            kwargs = self.cross_attention.arguments(kwargs)
        with internal_positions.position_ids(positions), self._watched():
            return self._model(**kwargs)

    def logits_of(self, result: Any, tokens: Tensor) -> Tensor:
        """Return (M, V) logits of the M tokens that were passed as `logits_to_keep`."""
        logits: Tensor = result.logits[0]
        return logits if self._keeps_logits else logits[tokens]

    def fit_vocabulary(self, logits: Tensor) -> Tensor:
        """Cut or pad logits to `vocab_size`."""
        if self._model_vocab_size == self.vocab_size:
            return logits
        return fit_logits(logits, self.vocab_size)

    def hidden(self, result: Any) -> list[Tensor]:
        """Return (B * T, hidden size) states of each of the hidden layers."""
        return [self._states(result, layer).flatten(0, 1) for layer in self.hidden_layers]

    def _watched(self) -> AbstractContextManager[None]:
        return nullcontext() if self._last is None else self._last.watched()

    def _states(self, result: Any, layer: int) -> Tensor:
        if self._last is not None and layer == BEFORE_NORM:
            return self._last.take()
        selected: Tensor = result.hidden_states[layer]
        return selected
