"""Decoders that attend to the output of an encoder beside their own tokens, such as Whisper's.

The encoder runs once, before the first token. What the cross-attention layers make of its output,
one line of keys and values per row, is computed in the decoder's first forward and kept; no draft
ever changes it. The lines are those of a rectangle, so these decoders take the rectangular path.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import CACHE_NAME

# Encoder-decoders that are served. Others tell where a token stands by how many are stored, so that
# the branches of a draft tree cannot be placed, or have not been tried.
ENCODER_DECODERS = {"whisper"}

# What the forward of an encoder-decoder calls the inputs of its decoder.
DECODER_NAMES = {
    name: f"decoder_{name}" for name in ("input_ids", "inputs_embeds", "attention_mask")
} | {"position_ids": "decoder_position_ids"}


def attends_to_encoder(model: PreTrainedModel) -> bool:
    """Whether a model needs the output of an encoder, its own or another model's."""
    return model.config.model_type in ENCODER_DECODERS


def is_lone_decoder(model: PreTrainedModel) -> bool:
    """Whether it is the decoder of an encoder-decoder by itself, as `WhisperForCausalLM`."""
    return attends_to_encoder(model) and not model.config.is_encoder_decoder


def takes_positions(model: PreTrainedModel) -> bool:
    """Whether the forward can be told where its tokens stand."""
    parameters = inspect.signature(model.forward).parameters
    # A lone decoder hands position_ids on without naming them.
    named = {"position_ids", DECODER_NAMES["position_ids"]} & set(parameters)
    return bool(named) or is_lone_decoder(model)


def num_layers(model: PreTrainedModel) -> int:
    """How many layers decode."""
    config: Any = model.config.get_text_config()
    # In a config for both halves the other number is that of the encoder.
    count: int = getattr(config, "decoder_layers", None) or config.num_hidden_layers
    return count


def decoding_parts(model: PreTrainedModel) -> list[nn.Module]:
    """What of a model the engine runs: all of it, or all but its encoder."""
    if not model.config.is_encoder_decoder:
        return [model]
    return [model.get_decoder(), model.get_output_embeddings()]


class CrossAttention:
    """What a decoder is called with beside its tokens: the encoder's output, and both caches.

    Args:
        model: it `attends_to_encoder`.
        states: (B, S, width) the encoder's last hidden states, one line per row.
        own: the cache of the decoder's own tokens.
        kept: where keys and values of the cross attention go; a new cache by default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        states: Tensor,
        own: Cache,
        kept: DynamicCache | None = None,
    ):
        states = states.to(_device(model), model.dtype)
        self._output = BaseModelOutput(last_hidden_state=states)
        self._cache = EncoderDecoderCache(own, DynamicCache() if kept is None else kept)
        self._names = DECODER_NAMES if model.config.is_encoder_decoder else {}

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments for a decoder-only model's forward, as this one calls them."""
        named = {self._names.get(name, name): value for name, value in given.items()}
        return {**named, "encoder_outputs": self._output, CACHE_NAME: self._cache}


def _device(model: PreTrainedModel) -> torch.device:
    embedding: Any = model.get_input_embeddings()
    return execution_device(embedding)
