"""Models made of some layers of another model; the first N layers can draft without training."""

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

# "truncated:N" names the target's first N layers; no Hub id has a colon.
PREFIX = "truncated:"
# Linear layers of a gated MLP; the last one reads the neurons.
GATED_MLP = ("gate_proj", "up_proj", "down_proj")


def truncated_draft(model: PreTrainedModel, num_layers: int) -> PreTrainedModel:
    """Return a model of the first `num_layers` layers of `model`, its embeddings, norm and head.

    Modules are shared, not copied. The draft model needs no memory, follows the target to another
    device and includes its LoRA adapters. Of an encoder-decoder the decoder is truncated. `model`
    may be a PEFT model.

    Raises:
        OptionError: if `num_layers` is out of range or the list of layers is ambiguous.
        UnsupportedError: if the model cannot run with some of its layers.
    """
    unwrap = getattr(model, "get_base_model", None)
    model = unwrap() if callable(unwrap) else model
    if not isinstance(model, PreTrainedModel):
        raise OptionError(f"model of type {type(model).__name__}: pass a loaded PreTrainedModel")
    depth = layers_of(model)
    if not isinstance(num_layers, int) or not 1 <= num_layers < depth:
        raise OptionError(
            f"num_layers={num_layers!r}: {type(model).__name__} has {depth} layers, "
            f"so a truncated draft has 1 to {depth - 1}"
        )
    return with_layers(model, range(num_layers))


def named_layers(name: object) -> int | None:
    """Return N if `name` is "truncated:N", the target's first N layers; else None."""
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return None
    count = name.removeprefix(PREFIX)
    if not (count.isascii() and count.isdigit()):
        raise OptionError(f"{name!r}: write {PREFIX}N with a number N of the target's first layers")
    return int(count)


def with_layers(model: PreTrainedModel, indices: range) -> PreTrainedModel:
    """Return a model with the layers `indices` of `model`; all modules are shared."""
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", None):
        raise UnsupportedError(
            f"{type(model).__name__} has an embedding per layer and token, so it cannot be "
            "truncated; use another draft model, or spec_strategy='lookup'"
        )
    depth = layers_of(model)
    is_encoder_decoder = model.config.is_encoder_decoder
    decoder: nn.Module = model.get_decoder() if is_encoder_decoder else model
    lists = (module for module in decoder.modules() if isinstance(module, nn.ModuleList))
    stacks = [layers for layers in lists if len(layers) == depth]
    if len(stacks) != 1:
        raise OptionError(
            f"{type(model).__name__} has {len(stacks)} lists of {depth} layers, but truncation "
            "needs exactly one; use a separate draft model"
        )
    weights = [{id(weight) for weight in layer.parameters()} for layer in stacks[0]]
    if sum(map(len, weights)) > len(set().union(*weights)):
        raise OptionError(
            f"the layers of {type(model).__name__} share weights, so it cannot be truncated; use a "
            "separate draft model"
        )
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config()
    depth_name = "decoder_layers" if is_encoder_decoder else "num_hidden_layers"
    setattr(text_config, depth_name, len(indices))
    # A property computes the types of fewer layers, too.
    name = text_config.attribute_map.get("layer_types", "layer_types")
    computed = isinstance(getattr(type(text_config), name, None), property)
    kinds = getattr(text_config, "layer_types", None)
    if kinds is not None and not computed:
        text_config.layer_types = [kinds[index] for index in indices]
    with torch.device("meta"):
        part = type(model)(config)
    _share_modules(model, part, stacks[0], indices)
    part.generation_config = copy.deepcopy(model.generation_config)
    return part.train(model.training)


def without_head(model: PreTrainedModel) -> Any:
    """Return the model inside `model` that outputs hidden states."""
    base: Any = model.base_model
    # Llama 4's `base_model_prefix` names an attribute that it does not have.
    return getattr(base, "model", base) if base is model else base


def own_copy(part: PreTrainedModel) -> PreTrainedModel:
    """Replace all modules of a truncated model but embeddings and head with dense copies.

    Returns the model itself; offloaded or sharded weights raise `UnsupportedError`.
    """
    table: Any = part.get_input_embeddings()
    shared = {id(table), id(part.get_output_embeddings())}
    weights = list(part.parameters())
    if any(w.device.type == "meta" or hasattr(w, "device_mesh") for w in weights):
        raise UnsupportedError(
            "this assistant shares the target's embedding and head and copies some of its layers, "
            "but these are offloaded or sharded among processes; load the target on one device, "
            "or use a separate draft model, or no assistant"
        )
    _copy_unshared(part, shared, table.weight.dtype)
    return part


def last_layers(
    target: PreTrainedModel, count: int, mlp_size: int | None = None
) -> PreTrainedModel:
    """Return a text model with copies of the last `count` layers of `target`.

    `mlp_size` limits the width of their MLPs to the neurons with the largest weights.
    """
    depth = target.config.get_text_config().num_hidden_layers
    whole: Any = with_layers(target, range(depth - count, depth))
    # Image models have a text model beside the vision tower.
    part = own_copy(whole.get_decoder() if takes_images(target) else without_head(whole))
    if mlp_size is not None:
        mlps = [module.mlp for module in part.modules() if hasattr(module, "mlp")]
        if len(mlps) != count:
            raise UnsupportedError(
                f"mlp_size={mlp_size}: {type(target).__name__} has layers without `mlp`; leave "
                "mlp_size out"
            )
        for mlp in mlps:
            _narrow_mlp(mlp, mlp_size)
        part.config.get_text_config().intermediate_size = mlp_size
    return part


@torch.no_grad()
def _narrow_mlp(mlp: Any, size: int) -> None:
    """Keep the `size` neurons of a gated MLP whose weights have the largest norms."""
    parts: list[Any] = [getattr(mlp, name, None) for name in GATED_MLP]
    if not all(isinstance(part, nn.Linear) for part in parts):
        raise UnsupportedError(
            f"mlp_size={size}: {type(mlp).__name__} is not a gated MLP of linear layers; leave "
            "mlp_size out"
        )
    into, out = [part.weight for part in parts[:2]], parts[2].weight
    if size > out.shape[1]:
        raise OptionError(f"mlp_size={size}: the target's MLPs have only {out.shape[1]} neurons")
    norms = [weight.float().norm(dim=1) for weight in (*into, out.T)]
    kept = torch.stack(norms).prod(dim=0).topk(size).indices.sort().values
    for part in parts[:2]:
        part.weight = nn.Parameter(part.weight[kept].clone())
        if part.bias is not None:
            part.bias = nn.Parameter(part.bias[kept].clone())
        part.out_features = size
    parts[2].weight = nn.Parameter(out[:, kept].clone())
    parts[2].in_features = size


def _copy_unshared(module: nn.Module, shared: set[int], dtype: torch.dtype) -> None:
    for name, child in list(module.named_children()):
        if id(child) in shared:
            continue
        if any(id(inner) in shared for inner in child.modules()):
            _copy_unshared(child, shared, dtype)
        else:
            setattr(module, name, dense_copy(child, dtype))


def _share_modules(
    source: nn.Module, copied: nn.Module, stack: nn.ModuleList, indices: range
) -> None:
    """Make `copied` use the submodules of `source`, with only `indices` of the layer `stack`."""
    copied._parameters.update(source._parameters)
    copied._buffers.update(source._buffers)
    for name, child in source.named_children():
        if name == LAYER_NAME:
            # Adapters belong to the whole model.
            continue
        if child is stack:
            setattr(copied, name, nn.ModuleList(stack[index] for index in indices))
        elif any(module is stack for module in child.modules()):
            _share_modules(child, getattr(copied, name), stack, indices)
        else:
            setattr(copied, name, child)
