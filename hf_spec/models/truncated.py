"""A draft model for everyone: the target's own first layers, sharing its weights."""

from __future__ import annotations

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_spec.errors import OptionError


def truncated_draft(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model made of the first `num_layers` layers of `model`, its embeddings, norm and head.

    Modules are shared, not copied: it costs no memory, follows the target to another device and
    sees its LoRA adapters.

    Args:
        model: a decoder-only model, or a PEFT model around one.
        num_layers: at least 1, fewer than the model has.

    Raises:
        OptionError: if `num_layers` is out of range or the layers cannot be found.
    """
    unwrap = getattr(model, "get_base_model", None)
    model = unwrap() if callable(unwrap) else model
    depth = model.config.get_text_config().num_hidden_layers
    if not isinstance(num_layers, int) or not 1 <= num_layers < depth:
        raise OptionError(
            f"num_layers={num_layers!r}: {type(model).__name__} has {depth} layers, "
            f"so a truncated draft has 1 to {depth - 1}"
        )
    stacks = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    ]
    if len(stacks) != 1:
        raise OptionError(
            f"{type(model).__name__} has {len(stacks)} lists of {depth} layers; "
            "truncated_draft needs exactly one"
        )
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    text_config.num_hidden_layers = num_layers
    if getattr(text_config, "layer_types", None) is not None:
        text_config.layer_types = list(text_config.layer_types[:num_layers])
    with torch.device("meta"):
        draft = type(model)(config)
    _share(model, draft, stacks[0], num_layers)
    draft.generation_config = copy.deepcopy(model.generation_config)
    return draft.train(model.training)


def _share(source: nn.Module, copied: nn.Module, stack: nn.ModuleList, num_layers: int) -> None:
    """Make `copied` use the submodules of `source`, with the layer stack cut."""
    copied._parameters.update(source._parameters)
    copied._buffers.update(source._buffers)
    for name, child in source.named_children():
        if child is stack:
            setattr(copied, name, nn.ModuleList(stack[:num_layers]))
        elif any(module is stack for module in child.modules()):
            _share(child, getattr(copied, name), stack, num_layers)
        else:
            setattr(copied, name, child)
