"""Refusals: what no strategy can serve exactly, said before the first forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from hf_spec.decoding.kv_cache import check_reusable
from hf_spec.errors import SpecError, UnsupportedError

# Layers whose whole past is a set of keys and values, so that a token can be taken back.
ATTENTION_LAYERS = {"full_attention", "sliding_attention"}

# Rotary scalings that look at the longest position of a forward, which a draft would shift.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}

# Settings that choose another decoding method, and what to say about each.
OTHER_METHODS = {
    "penalty_alpha": "contrastive search",
    "dola_layers": "DoLa decoding",
    "constraints": "constrained beam search",
    "force_words_ids": "constrained beam search",
    "prompt_lookup_num_tokens": "transformers' prompt lookup (use spec_strategy='lookup')",
    "assistant_early_exit": "early-exit speculation (use hf_spec.truncated_draft)",
    "use_mtp": "transformers' multi-token prediction",
    "speculation_type": "another speculation",
    "token_healing": "token healing",
    "cache_implementation": "a cache of its own",
    "prefill_chunk_size": "chunked prefill (long prompts are run in stretches anyway)",
}

# Keyword arguments of the decoding step that are understood; anything else would be dropped.
UNDERSTOOD = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",
    "logits_to_keep",
    "return_dict",
    "token_type_ids",
}


def check_model(model: object) -> None:
    """Refuse models whose state cannot be rolled back token by token.

    Raises:
        UnsupportedError: names the model and the reason.
    """
    if not isinstance(model, PreTrainedModel):
        raise UnsupportedError(f"{type(model).__name__} is not a transformers PreTrainedModel")
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        raise UnsupportedError(f"{name} is an encoder-decoder; hf_spec serves decoder-only models")
    config = model.config.get_text_config()
    odd = sorted(set(getattr(config, "layer_types", None) or []) - ATTENTION_LAYERS)
    if getattr(model, "_is_stateful", False) or odd:
        detail = f"layers of type {', '.join(odd)}" if odd else "a recurrent state"
        raise UnsupportedError(
            f"{name} has {detail}, which cannot take a rejected token back; "
            "generate without spec_strategy"
        )
    if not model.can_generate():
        raise UnsupportedError(f"{name} has no language-model head and cannot generate")
    owner = getattr(model.prepare_inputs_for_generation, "__self__", model)
    if getattr(getattr(owner, "active_peft_config", None), "is_prompt_learning", False):
        raise UnsupportedError(
            "prompt-learning adapters put virtual tokens before every input, which spec_strategy "
            "cannot carry; use LoRA or another adapter that changes weights"
        )
    if not model._supports_attention_backend and getattr(config, "sliding_window", None):
        raise UnsupportedError(
            f"{name} has a sliding window but no attention interface, so the window of a draft "
            "tree cannot be set"
        )


def check_settings(config: GenerationConfig, model_kwargs: Mapping[str, Any]) -> None:
    """Refuse generation settings that another decoding method owns, and unknown model inputs.

    Raises:
        UnsupportedError: names the setting and its value.
    """
    if (config.num_beams or 1) > 1:
        raise UnsupportedError(
            f"num_beams={config.num_beams}: spec_strategy decodes greedily or by sampling; "
            "set num_beams=1"
        )
    for name, method in OTHER_METHODS.items():
        value = getattr(config, name, None)
        if value is not None and value is not False:
            raise UnsupportedError(f"{name}={value!r} asks for {method}; unset it")
    for name in ("output_attentions", "output_hidden_states"):
        if getattr(config, name, None):
            raise UnsupportedError(
                f"{name}=True is not available with spec_strategy: the forward passes hold drafts; "
                "run the finished sequence through model() instead"
            )
    if not model_kwargs.get("use_cache", True):
        raise UnsupportedError("use_cache=False: speculative decoding keeps keys and values")
    extra = sorted(k for k, v in model_kwargs.items() if v is not None and k not in UNDERSTOOD)
    if extra:
        raise UnsupportedError(
            f"model inputs {', '.join(extra)} cannot be used with spec_strategy; "
            "text given as input_ids can"
        )


def check_inputs(
    model: PreTrainedModel,
    input_ids: Tensor,
    attention_mask: Tensor,
    model_kwargs: Mapping[str, Any],
    max_length: int | None,
) -> None:
    """Refuse prompts that the unpadded layout cannot hold.

    Args:
        model: the target.
        input_ids: (B, L) int64, expanded for `num_return_sequences`.
        attention_mask: (B, L) or longer where a cache holds the beginning.
        model_kwargs: for `past_key_values`, `position_ids` and `token_type_ids`.
        max_length: longest sequence that can come out, in tokens.

    Raises:
        UnsupportedError: names the row or the value.
    """
    if input_ids.ndim != 2 or input_ids.shape[1] == 0:
        raise UnsupportedError(
            f"input_ids of shape {tuple(input_ids.shape)}: spec_strategy needs a prompt of at "
            "least one token per row, given as input_ids"
        )
    vocab = model.get_input_embeddings().weight.shape[0]
    if int(input_ids.min()) < 0 or int(input_ids.max()) >= vocab:
        raise UnsupportedError(
            f"input_ids hold values from {int(input_ids.min())} to {int(input_ids.max())}, "
            f"the model's vocabulary 0 to {vocab - 1}"
        )
    bad = (attention_mask[:, -1] == 0).nonzero().flatten().tolist()
    if bad:
        raise UnsupportedError(
            f"rows {bad} end in padding (attention_mask 0 in the last column); "
            "pad on the left: tokenizer.padding_side = 'left'"
        )
    if attention_mask.shape != input_ids.shape:
        raise UnsupportedError(
            f"attention_mask of shape {tuple(attention_mask.shape)} does not match input_ids "
            f"{tuple(input_ids.shape)}; pass the whole sequence as input_ids, also with a reused "
            "past_key_values"
        )
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        expected = (attention_mask.long().cumsum(-1) - 1).clamp_(min=0)
        given = positions.expand(input_ids.shape[0], -1)[:, -input_ids.shape[1] :]
        if given.shape != expected.shape or not torch.equal(given[attention_mask.bool()].to(
            expected.device), expected[attention_mask.bool()]):
            raise UnsupportedError(
                "position_ids other than 0, 1, 2, ... over the attended tokens cannot be used with "
                "spec_strategy; leave them out"
            )
    types = model_kwargs.get("token_type_ids")
    if types is not None and bool(types.any()):
        raise UnsupportedError("token_type_ids other than 0 cannot be used with spec_strategy")
    cache = model_kwargs.get("past_key_values")
    if cache is not None:
        check_reusable(cache)
        stored = cache.get_seq_length()
        if stored and (stored >= input_ids.shape[1]):
            raise UnsupportedError(
                f"past_key_values hold {stored} tokens and input_ids {input_ids.shape[1]}; "
                "input_ids must hold the whole sequence, with at least one token that is not cached"
            )
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default") if isinstance(rope, Mapping) else "default"
    limit = getattr(model.config.get_text_config(), "original_max_position_embeddings", None)
    limit = limit or rope.get("original_max_position_embeddings")
    limit = limit or getattr(model.config.get_text_config(), "max_position_embeddings", 0)
    if kind in LENGTH_DEPENDENT_ROPE and (max_length is None or max_length > limit):
        raise UnsupportedError(
            f"rope_type={kind!r} changes its frequencies past {limit} tokens, so a draft would "
            f"change the output; keep max_length at {limit} or below (it is {max_length})"
        )


__all__ = ["SpecError", "check_inputs", "check_model", "check_settings"]
