"""Decoders that attend to the output of an encoder beside their own tokens, such as Whisper's.

The keys and values of the cross attention, one line per row, are computed in the decoder's first
forward pass and cached; drafts do not change them. They form a rectangle, so these decoders take
the rectangular path.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import CACHE_NAME

# Supported encoder-decoders. Others count stored tokens instead of taking positions, which the
# branches of a draft tree need, or are untested.
ENCODER_DECODERS = {"whisper"}

# Arguments of a decoder-only model -> their names in an encoder-decoder.
DECODER_NAMES = {
    name: f"decoder_{name}"
    for name in ("input_ids", "inputs_embeds", "attention_mask", "position_ids")
}


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Return True if a model needs the output of an encoder, its own or another model's."""
    return model.config.model_type in ENCODER_DECODERS


def is_lone_decoder(model: PreTrainedModel) -> bool:
    """Return True for the decoder of an encoder-decoder alone, e.g. `WhisperForCausalLM`."""
    return attends_to_encoder(model) and not model.config.is_encoder_decoder


def takes_positions(model: PreTrainedModel) -> bool:
    """Return True if the model's forward takes position ids."""
    parameters = inspect.signature(model.forward).parameters
    # A decoder alone passes position_ids on without naming them.
    named = {"position_ids", DECODER_NAMES["position_ids"]} & set(parameters)
    return bool(named) or is_lone_decoder(model)


def num_layers(model: PreTrainedModel) -> int:
    """Return the number of layers of the decoder."""
    config: Any = model.config.get_text_config()
    # In a config of both halves, `num_hidden_layers` is that of the encoder.
    count: int = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    return count


def decoding_parts(model: PreTrainedModel) -> list[nn.Module]:
    """Return the parts of a model that the engine runs: all of it, or all but its encoder."""
    if not model.config.is_encoder_decoder:
        return [model]
    return [model.get_decoder(), model.get_output_embeddings()]


class CrossAttention:
    """Additional arguments of a decoder: the encoder's output, and both caches.

    Args:
        model: a model that `attends_to_encoder`.
        states: (B, S, width) last hidden states of the encoder, one line per row.
        self_cache: cache of the decoder's own tokens.
        cross_cache: cache of the cross attention; a new one by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: Tensor,
        self_cache: Cache,
        cross_cache: DynamicCache | None = None,
    ):
        embedding: Any = model.get_input_embeddings()
        states = states.to(execution_device(embedding), model.dtype)
        self._output = BaseModelOutput(last_hidden_state=states)
        cross_cache = DynamicCache() if cross_cache is None else cross_cache
        self._cache = EncoderDecoderCache(self_cache, cross_cache)
        self._names = DECODER_NAMES if model.config.is_encoder_decoder else {}

    def arguments(self, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of a decoder-only model under this model's names, and the others."""
        named = {self._names.get(name, name): value for name, value in kwargs.items()}
        return {**named, "encoder_outputs": self._output, CACHE_NAME: self._cache}
