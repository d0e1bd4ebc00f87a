"""Checks of the target for one call: its mode, adapters, cache and maximum length.

What no call could change is checked in `hf_spec.engine.models.support_checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.nn.quantized import dynamic
from transformers import PreTrainedModel

from hf_spec.common.compat import CACHE_NAME, CACHE_NAMES, find_cache
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.engine.models.recurrent_layers import num_attention_layers, resumes
from hf_spec.engine.models.support_checks import check_attention_function

# Rotary scalings that depend on the longest position of a forward pass, which a draft changes.
LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}


def check_batching(model: PreTrainedModel, batching: str) -> None:
    """Raise an error for a padding mode that the model's inputs rule out."""
    mode = BATCHING[batching]
    if mode.pads_kv and not mode.pads_inputs and not takes_packed(model):
        raise UnsupportedError(
            f"batching={batching!r}: {type(model).__name__} takes no attention function, so that "
            "its inputs are always padded; use 'padded', or 'unpadded' for unpadded storage"
        )


def check_evaluation(model: PreTrainedModel) -> None:
    """Raise an error for a target whose forward pass would not be that of plain `generate()`.

    It is in training mode with random layers, or attends by a function that would be replaced.
    """
    check_attention_function(model)
    training = [module for module in model.modules() if module.training]
    if not training:
        return
    random = any(isinstance(m, nn.modules.dropout._DropoutNd) and m.p > 0 for m in training)
    recomputes = any(getattr(m, "gradient_checkpointing", False) for m in training)
    config = model.config.get_text_config().to_dict()
    drops = sorted(k for k, v in config.items() if "drop" in k and isinstance(v, float) and v > 0)
    if random or recomputes or drops:
        raise UnsupportedError(
            f"{type(model).__name__} is in training mode with dropout or gradient checkpointing"
            f"{' (' + ', '.join(drops) + ')' if drops else ''}; call model.eval() before generate()"
        )


def check_input_scales(model: PreTrainedModel) -> None:
    """Raise an error for linear layers in which a token's output depends on other tokens.

    PyTorch's `quantize_dynamic` quantizes all inputs of a linear layer to 8 bits with one scale, so
    drafts in the same forward pass, including rejected ones, would change the output. torchao does
    so with `granularity=PerTensor()`.
    """
    for name, module in model.named_modules():
        if isinstance(module, dynamic.Linear) and module._packed_params.dtype == torch.qint8:
            raise UnsupportedError(
                f"{name} of {type(model).__name__} was quantized by quantize_dynamic and rounds "
                "all inputs of a forward pass with one scale, so drafts would change the output; "
                "generate without spec_strategy, quantize with dtype=torch.float16, or load the "
                "model with bitsandbytes"
            )
        for weight in module._parameters.values():
            if (remedy := _setting_with_scales_per_token(weight)) is not None:
                raise UnsupportedError(
                    f"{name} of {type(model).__name__} was quantized by torchao and rounds all "
                    "inputs of a forward pass with one scale, so drafts would change the output; "
                    f"generate without spec_strategy, or quantize with {remedy}"
                )


def _setting_with_scales_per_token(weight: Any) -> str | None:
    """Return the setting of torchao to use instead if the inputs of `weight` share one scale."""
    # Classes of torchao are known by name, since it need not be installed.
    settings = getattr(weight, "act_quant_kwargs", None)
    shared = type(getattr(settings, "granularity", None)).__name__ == "PerTensor"
    # A calibrated scale does not depend on the inputs.
    if shared and getattr(weight, "act_quant_scale", None) is None:
        return "granularity=PerRow()"
    if getattr(settings, "use_dynamic_per_tensor_scale", False):
        return "use_dynamic_per_tensor_scale=False"
    return None


def check_resumable(model: PreTrainedModel) -> None:
    """Raise an error for a reused cache if transformers itself cannot continue it correctly."""
    if not resumes(model):
        raise UnsupportedError(
            f"{CACHE_NAME}: the scan of {type(model).__name__} in transformers resets its state "
            "when it gets several tokens at once; leave the cache out"
        )


def check_cache_length(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Raise an error for a cache of recurrent states only, which does not store its length."""
    if find_cache(arguments) is None or num_attention_layers(model.config.get_text_config()):
        return
    name = next(name for name in CACHE_NAMES if arguments.get(name) is not None)
    raise UnsupportedError(
        f"{name}= of {type(model).__name__} does not record how many tokens it holds; leave it out "
        "and give the whole text as input_ids"
    )


def check_peft_hooks(model: PreTrainedModel, num_rows: int) -> None:
    """Raise an error for PEFT's per-call hooks if they would read drafts as sequences.

    With `adapter_names=`, and for aLoRA adapters, PEFT's layers expect one row per sequence and
    count positions from the end of a forward pass. PEFT removes these hooks only after a successful
    call, so they are removed here before the error is raised.
    """
    hooks = [
        (module, key, getattr(hook, "keywords", {}))
        for module in model.modules()
        for key, hook in module._forward_pre_hooks.items()
    ]
    names = next((k["adapter_names"] for *_, k in hooks if "adapter_names" in k), None)
    offsets = next((k["alora_offsets"] for *_, k in hooks if "alora_offsets" in k), None)
    reason = None
    if any(offset is not None for offset in offsets or ()):
        reason = (
            "aLoRA adapters begin at a position counted from the end of a forward pass, which has "
            "drafts there; generate without spec_strategy"
        )
    elif (names or offsets) and num_rows > 1 and takes_packed(model):
        reason = (
            f"adapter_names={names!r}: PEFT expects one row of a forward pass per sequence, and "
            "the engine packs all sequences into one; call generate() once per adapter, after "
            "model.set_adapter(name), or with one row at a time"
        )
    if reason is None:
        return
    for module, key, keywords in hooks:
        if "adapter_names" in keywords or "alora_offsets" in keywords:
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    raise UnsupportedError(reason)


def check_rope(model: PreTrainedModel, max_length: int | None) -> None:
    """Raise an error if a draft would change the rotary frequencies at some length of the call."""
    kind, limit = _length_dependent_rope(model)
    if kind is not None and (max_length is None or max_length > limit):
        raise UnsupportedError(
            f"rope_type={kind!r} changes its frequencies past {limit} tokens, so a draft would "
            f"change the output; keep max_length at {limit} or below (it is {max_length})"
        )


def check_index(model: PreTrainedModel, max_length: int | None) -> None:
    """Raise an error if sparse attention layers would leave tokens out at some length of the call.

    Their index ranks earlier tokens; up to `index_topk` tokens, all are attended to.
    """
    config: Any = model.config.get_text_config()
    indexed = "indexed_attention" in (getattr(config, "layer_types", None) or ())
    limit = config.index_topk if indexed else None
    if limit is not None and (max_length is None or max_length > limit):
        raise UnsupportedError(
            f"{type(model).__name__} attends to at most {limit} tokens, selected by an index "
            f"that draft trees do not have; keep max_length at {limit} or below "
            f"(it is {max_length})"
        )


def is_past_rope(model: PreTrainedModel, attention_mask: Tensor) -> bool:
    """Return True if every row of a (B, L) mask begins past the length where LongRoPE changes."""
    kind, limit = _length_dependent_rope(model)
    return kind == "longrope" and int(attention_mask.sum(dim=1).min()) > limit


def _length_dependent_rope(model: PreTrainedModel) -> tuple[str | None, int]:
    """Return the length-dependent rotary scaling, if any, and the length where it begins."""
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
