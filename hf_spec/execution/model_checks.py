"""Refusals of models: what no strategy can decode exactly, said before the first forward pass."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.devices.distributed_checks import check_sharding, tensor_parallel_size
from hf_spec.errors import UnsupportedError
from hf_spec.execution.alibi import uses_alibi
from hf_spec.execution.attention import takes_packed
from hf_spec.execution.cross_attention import (
    ENCODER_DECODERS,
    is_lone_decoder,
    takes_positions,
)
from hf_spec.execution.mixers import (
    PASTLESS_LAYERS,
    RECURRENT_LAYERS,
    mixers_of,
    num_attention_layers,
    num_recurrent_layers,
    stateful_modules,
)

# Layers whose past can be taken back: keys and values, the state of a mixer, or nothing at all.
SERVED_LAYERS = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    *RECURRENT_LAYERS,
    *PASTLESS_LAYERS,
}

# Architectures whose attention needs more than keys, values and a mask of visible tokens.
UNSERVED = {
    "doge": "its mask weighs keys by their values, which a draft tree cannot carry",
    "kosmos_2_5_text_model": "plain generate() has it count positions from its padding token on",
    "mllama_text_model": "its cross-attention layers read images, not keys of its tokens",
    "hrm_text": "its layers run several times per token, each time with other keys and values",
    "moshi": "its tokens stand for text and sound at once",
}

# What the rectangular path can be shown a tree by; None stands for a class's own.
MASKED_ATTENTION = (None, "eager", "sdpa")

# Rotary scalings that look at the longest position of a forward, which a draft would shift.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_model(model: object) -> None:
    """Refuse targets whose state cannot be rolled back token by token (`UnsupportedError`)."""
    if isinstance(model, PreTrainedModel) and is_lone_decoder(model):
        raise UnsupportedError(
            f"{type(model).__name__} is a decoder without its encoder: load the whole model, or "
            "pass this one as assistant= of a model that has an encoder"
        )
    check_decoder(model)


def check_decoder(model: object) -> None:
    """The same of what is run on trees: targets, and draft models, which may lack an encoder."""
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers PreTrainedModel")
    name = type(model).__name__
    if model.config.is_encoder_decoder and model.config.model_type not in ENCODER_DECODERS:
        raise UnsupportedError(
            f"{name} is an encoder-decoder; hf_spec serves Whisper, which can be told where the "
            "branches of a draft tree stand, and decoder-only models"
        )
    config = model.config.get_text_config()
    odd = sorted(set(getattr(config, "layer_types", None) or []) - SERVED_LAYERS)
    if odd or not _has_known_states(model):
        detail = f"layers of type {', '.join(odd)}" if odd else "a recurrent state of its own kind"
        raise UnsupportedError(
            f"{name} has {detail}, which cannot take a rejected token back; "
            "generate without spec_strategy"
        )
    if not model.can_generate():
        raise UnsupportedError(f"{name} has no language-model head and cannot generate")
    _check_attention(model, name)
    check_sharding(model)
    if tensor_parallel_size(model) > 1 and mixers_of(model):
        raise UnsupportedError(
            f"{name} has recurrent layers, which are served in one process; load it without tp_plan"
        )
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "prompt-learning adapters put virtual tokens before every input, which spec_strategy "
            "cannot carry; use LoRA or another adapter that changes weights"
        )
    chosen = model.config._attn_implementation
    if not takes_packed(model) and chosen not in MASKED_ATTENTION:
        raise UnsupportedError(
            f"attn_implementation={chosen!r} takes no mask of a draft tree, {name} no attention "
            "function in its place; load it with attn_implementation='sdpa'"
        )
    if not takes_packed(model) and limits_attention(model):
        raise UnsupportedError(
            f"{name} has a sliding window or chunks but no attention interface, so what a draft "
            "tree sees cannot be set"
        )


def _has_known_states(model: PreTrainedModel) -> bool:
    """Whether every state that the model keeps is that of a mixer, one in a layer."""
    recurrent = num_recurrent_layers(model.config.get_text_config())
    mixers = mixers_of(model)
    if len(mixers) != recurrent or mixers != stateful_modules(model):
        return False
    unknown = getattr(model, "_is_stateful", False) and not recurrent
    return not unknown and len({mixer.layer_idx for mixer in mixers}) == recurrent


def _check_attention(model: PreTrainedModel, name: str) -> None:
    """Refuse models that cannot be shown a tree: where its tokens stand, what they look back on."""
    config = model.config.get_text_config()
    arguments = inspect.signature(model.forward).parameters
    reason = UNSERVED.get(config.model_type)
    # Encoders that can be made decoders know cross attention; GPT-NeoX has the same unused field.
    encoder = getattr(config, "is_decoder", True) is False
    if encoder and hasattr(config, "add_cross_attention"):
        reason = "config.is_decoder is False, so that tokens also look ahead"
    elif not {"past_key_values", "cache_params"} & set(arguments):
        reason = "it keeps no keys and values"
    elif not takes_positions(model) and not uses_alibi(model) and num_attention_layers(config):
        reason = "it takes no position_ids, so the branches of a draft tree cannot be placed"
    elif "local" in (getattr(config, "attention_layers", None) or ()):
        reason = "the window of its local layers counts stored tokens, not positions"
    if reason is not None:
        raise UnsupportedError(f"{name} cannot decode draft trees: {reason}")


def check_rope(model: PreTrainedModel, max_length: int | None) -> None:
    """Refuse rotary frequencies that a draft would change, for lengths where they change."""
    kind, limit = _length_dependent_rope(model)
    if kind is not None and (max_length is None or max_length > limit):
        raise UnsupportedError(
            f"rope_type={kind!r} changes its frequencies past {limit} tokens, so a draft would "
            f"change the output; keep max_length at {limit} or below (it is {max_length})"
        )


def is_past_rope(model: PreTrainedModel, attention_mask: Tensor) -> bool:
    """Whether every row, by its (B, L) mask, begins past where rotary frequencies change once."""
    kind, limit = _length_dependent_rope(model)
    return kind == "longrope" and int(attention_mask.sum(dim=1).min()) > limit


def limits_attention(model: PreTrainedModel) -> bool:
    """Whether layers of a model see no more than a window or a chunk of the text."""
    config = model.config.get_text_config()
    limits = ("sliding_window", "attention_chunk_size")
    return any(getattr(config, name, None) for name in limits)


def takes_images(model: PreTrainedModel) -> bool:
    """Whether a model reads images beside text; the text model inside says that it does, too."""
    config = model.config
    return "image" in model.input_modalities and config.get_text_config() is not config


def _length_dependent_rope(model: PreTrainedModel) -> tuple[str | None, int]:
    """The kind of rotary frequencies that follow from the length, and up to where they do not."""
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None)
    rope = rope if isinstance(rope, Mapping) else {}
    kind = rope.get("rope_type", "default")
    limit = (
        getattr(config, "original_max_position_embeddings", None)
        or rope.get("original_max_position_embeddings")
        or getattr(config, "max_position_embeddings", None)
        or 0
    )
    return (kind if kind in LENGTH_DEPENDENT_ROPE else None), limit
