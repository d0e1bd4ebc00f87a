"""Refusals of a target as a call finds it: its mode, its adapters, what is to be padded or resumed.

What no call could change is the matter of `hf_spec.engine.models.support_checks`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.ao.nn.quantized import dynamic
from transformers import PreTrainedModel

from hf_spec.common.compat import CACHE_NAME, CACHE_NAMES, find_cache
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.row_batch import BATCHING
from hf_spec.engine.forward.tree_attention import takes_packed
from hf_spec.engine.models.recurrent_layers import num_attention_layers, resumes


def check_batching(model: PreTrainedModel, batching: str) -> None:
    """Refuse padding that the layout of the model's inputs does not allow to choose."""
    chosen = BATCHING[batching]
    if chosen.pads_kv and not chosen.pads_inputs and not takes_packed(model):
        raise UnsupportedError(
            f"batching={batching!r}: {type(model).__name__} takes no attention function, so that "
            "its inputs are always padded; use 'padded', or 'unpadded' for unpadded storage"
        )


def check_evaluation(model: PreTrainedModel) -> None:
    """Refuse a target in training mode wherever that changes its forward pass."""
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


def check_rows_apart(model: PreTrainedModel) -> None:
    """Refuse a target whose layers let the tokens of a forward change each other's products.

    PyTorch's `quantize_dynamic` rounds the inputs of a linear layer to 8 bits by one scale for all
    of them. What a token gives then depends on the drafts beside it, wrong ones too.
    """
    for name, module in model.named_modules():
        rounds = isinstance(module, dynamic.Linear) and module._packed_params.dtype == torch.qint8
        if rounds:
            raise UnsupportedError(
                f"{name} of {type(model).__name__} was quantised by quantize_dynamic and rounds "
                "all inputs of a forward by one scale, so that drafts would change the output; "
                "generate without spec_strategy, quantise with dtype=torch.float16, or load the "
                "model with bitsandbytes"
            )


def check_resumable(model: PreTrainedModel) -> None:
    """Refuse a reused cache where transformers itself goes wrong on several tokens after it."""
    if not resumes(model):
        raise UnsupportedError(
            f"{CACHE_NAME}: the scan of {type(model).__name__} in transformers forgets its "
            "state wherever it is given several tokens at once; leave them out"
        )


def check_cache_length(model: PreTrainedModel, arguments: Mapping[str, Any]) -> None:
    """Reject a cache of states alone, which does not record how many tokens it holds."""
    if find_cache(arguments) is None or num_attention_layers(model.config.get_text_config()):
        return
    name = next(name for name in CACHE_NAMES if arguments.get(name) is not None)
    raise UnsupportedError(
        f"{name}= of {type(model).__name__} does not record how many tokens it holds; leave it out "
        "and give the whole text as input_ids"
    )


def check_peft_hooks(model: PreTrainedModel, num_rows: int) -> None:
    """Refuse what PEFT hangs on its layers for one call, where drafts are not what it expects.

    With `adapter_names=`, and for aLoRA adapters, the layers look for one row per sequence, and
    count places from the end of a forward. The hooks are taken off before the error, which PEFT
    leaves to a call that ends well; else they would disturb all calls to come.
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
            "aLoRA adapters begin at a place counted from the end of a forward, where there are "
            "drafts; generate without spec_strategy"
        )
    elif (names or offsets) and num_rows > 1 and takes_packed(model):
        reason = (
            f"adapter_names={names!r}: the rows of a step are not padded to rows of equal length, "
            "where PEFT looks for the adapter of each; call generate() once per adapter, after "
            "model.set_adapter(name), or with one row at a time"
        )
    if reason is None:
        return
    for module, key, keywords in hooks:
        if "adapter_names" in keywords or "alora_offsets" in keywords:
            module._forward_pre_hooks.pop(key)
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    raise UnsupportedError(reason)
