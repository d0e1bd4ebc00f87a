"""A model made of some of another's layers; the first ones are a draft model for everyone."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_spec.adapters.folder import LAYER_NAME
from hf_spec.backend.device.placement import dense_copy
from hf_spec.common.errors import OptionError, UnsupportedError
from hf_spec.engine.models.cross_attention import num_layers as layers_of
from hf_spec.engine.models.support_checks import takes_images

# So begins a name for some of the target's own layers; no Hub id has a colon.
PREFIX = "truncated:"


def truncated_draft(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """A model made of the first `num_layers` layers of `model`, its embeddings, norm and head.

    Modules are shared, not copied: it costs no memory, follows the target to another device and
    sees its LoRA adapters.

    Args:
        model: a decoder-only model, an encoder-decoder, of which the decoder is cut, or a PEFT
            model around either.
        num_layers: at least 1, fewer than the model has.

    Raises:
        OptionError: if `num_layers` is out of range or the layers cannot be found.
        UnsupportedError: if its layers cannot be parted.
    """
    unwrap = getattr(model, "get_base_model", None)
    model = unwrap() if callable(unwrap) else model
    if not isinstance(model, PreTrainedModel):
        raise OptionError(f"model of type {type(model).__name__}: pass a model that is loaded")
    depth = layers_of(model)
    if not isinstance(num_layers, int) or not 1 <= num_layers < depth:
        raise OptionError(
            f"num_layers={num_layers!r}: {type(model).__name__} has {depth} layers, "
            f"so a truncated draft has 1 to {depth - 1}"
        )
    return with_layers(model, range(num_layers))


def named_layers(name: object) -> int | None:
    """N where `name` is "truncated:N", as the target's own first N layers are called; else None.

    Raises:
        OptionError: if N is no number.
    """
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return None
    count = name.removeprefix(PREFIX)
    if not (count.isascii() and count.isdigit()):
        raise OptionError(f"{name!r}: {PREFIX}N is the target's own first N layers, N a number")
    return int(count)


def with_layers(model: PreTrainedModel, kept: range) -> PreTrainedModel:
    """A model made of the layers `kept` of `model`; every module is shared, also those layers."""
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        raise UnsupportedError(
            f"{type(model).__name__} gives every layer an embedding of its own for each token, so "
            "no part of its layers makes a model; use another draft model, or "
            "spec_strategy='lookup'"
        )
    depth = layers_of(model)
    encodes = model.config.is_encoder_decoder
    decodes: nn.Module = model.get_decoder() if encodes else model
    lists = (module for module in decodes.modules() if isinstance(module, nn.ModuleList))
    stacks = [layers for layers in lists if len(layers) == depth]
    if len(stacks) != 1:
        raise OptionError(
            f"{type(model).__name__} has {len(stacks)} lists of {depth} layers; "
            "to cut it, it needs exactly one"
        )
    weights = [{id(weight) for weight in layer.parameters()} for layer in stacks[0]]
    if sum(map(len, weights)) > len(set().union(*weights)):
        raise OptionError(
            f"the layers of {type(model).__name__} share weights, so it cannot be cut; use a draft "
            "model of its own"
        )
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    setattr(text_config, "decoder_layers" if encodes else "num_hidden_layers", len(kept))
    # Where they follow from other settings, they do so for fewer layers, too.
    name = text_config.attribute_map.get("layer_types", "layer_types")
    follow = isinstance(getattr(type(text_config), name, None), property)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is not None and not follow:
        text_config.layer_types = [kinds[index] for index in kept]
    with torch.device("meta"):
        part = type(model)(config)
    _share(model, part, stacks[0], kept)
    part.generation_config = copy.deepcopy(model.generation_config)
    return part.train(model.training)


def without_head(model: PreTrainedModel) -> Any:
    """The model inside `model`, which gives hidden states."""
    base: Any = model.base_model
    # The prefix of Llama 4 names an attribute that it does not have.
    return getattr(base, "model", base) if base is model else base


def own_copy(part: PreTrainedModel) -> PreTrainedModel:
    """Give a cut model its own dense copy of all but embeddings and head; returns the model."""
    table: Any = part.get_input_embeddings()
    shared = {id(table), id(part.get_output_embeddings())}
    weights = list(part.parameters())
    if any(w.device.type == "meta" or hasattr(w, "device_mesh") for w in weights):
        raise UnsupportedError(
            "this assistant shares the target's embedding and head and copies some of its layers; "
            "some of these are offloaded or cut up among processes: load the target without, or "
            "use a strategy with a draft model of its own, or none"
        )
    _copy_unshared(part, shared, table.weight.dtype)
    return part


def last_layers(target: PreTrainedModel, count: int) -> PreTrainedModel:
    """A model of text with copies of its own of the last `count` layers of `target`."""
    depth = target.config.get_text_config().num_hidden_layers
    whole: Any = with_layers(target, range(depth - count, depth))
    # Beside a vision tower there is a model of text.
    return own_copy(whole.get_decoder() if takes_images(target) else without_head(whole))


def _copy_unshared(module: nn.Module, shared: set[int], dtype: torch.dtype) -> None:
    for name, child in list(module.named_children()):
        if id(child) in shared:
            continue
        if any(id(inner) in shared for inner in child.modules()):
            _copy_unshared(child, shared, dtype)
        else:
            setattr(module, name, dense_copy(child, dtype))


def _share(source: nn.Module, copied: nn.Module, stack: nn.ModuleList, kept: range) -> None:
    """Make `copied` use the submodules of `source`, of the layer stack those in `kept`."""
    copied._parameters.update(source._parameters)
    copied._buffers.update(source._buffers)
    for name, child in source.named_children():
        if name == LAYER_NAME:
            # Adapters of the whole model.
            continue
        if child is stack:
            setattr(copied, name, nn.ModuleList(stack[index] for index in kept))
        elif any(module is stack for module in child.modules()):
            _share(child, getattr(copied, name), stack, kept)
        else:
            setattr(copied, name, child)
