"""Why a decoder layer runs uncompiled: its mode, weights, hooks, or low-rank changes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every_module

from hf_spec.backend.cpu.eight_bit import is_dynamic
from hf_spec.backend.cpu.four_bit import is_four_bit
from hf_spec.engine.fast.layer_tracing import tensors_of
from hf_spec.engine.fast.packed_linear import has_fast_forward, is_quantized
from hf_spec.engine.forward.low_rank_change import LowRankChange, changes_in

# Type of device -> supported dtypes.
Dtypes = Mapping[str, Collection[torch.dtype]]


def obstacle(layer: nn.Module, dtypes: Dtypes, compiled: type) -> str | None:
    """Return why a layer cannot be compiled, or None.

    Args:
        layer: a decoder layer, as it is now.
        dtypes: dtypes of weights that are compiled, by type of device.
        compiled: class of the forwards that compiled layers have.
    """
    if layer.training:
        return "it is in training mode"
    quantized = {id(part.weight) for part in layer.modules() if is_quantized(part)}
    tensors = [tensor for tensor in tensors_of(layer).values() if id(tensor) not in quantized]
    if (reason := _weights_obstacle(tensors, dtypes)) is not None:
        return reason
    if any(map(is_dynamic, layer.modules())) and tensors[0].dtype != torch.bfloat16:
        return "it has 8-bit weights, which are compiled in bfloat16"
    if every_module._global_forward_hooks or every_module._global_forward_pre_hooks:
        return "there are hooks of all modules"
    for module in layer.modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # Hooks of the layer itself are called around it.
        harmless = module is layer or all(map(_is_harmless, hooks))
        # A compiled layer reads packed weights itself.
        forward = vars(module).get("forward")
        replaced = forward is not None and not isinstance(forward, compiled)
        replaced = replaced and not has_fast_forward(module)
        if replaced or not harmless or hasattr(module, "_hf_hook"):
            return "it has hooks or a forward of its own"
    return _change_obstacle(layer)


def _is_harmless(hook: Any) -> bool:
    # Hooks of transformers collect outputs; compiled layers contain low-rank changes.
    package = getattr(hook, "__module__", "").partition(".")[0]
    return package == "transformers" or isinstance(hook, LowRankChange)


def _change_obstacle(layer: nn.Module) -> str | None:
    """Return why low-rank changes cannot be part of the compiled layer, or None."""
    weights = [module._parameters.get("weight") for module in layer.modules()]
    for module in layer.modules():
        if not changes_in(module):
            continue
        if type(module) is not nn.Linear and not is_four_bit(module):
            return f"there is a low-rank change of a layer of class {type(module).__name__}"
        if sum(weight is module.weight for weight in weights) > 1:
            return "there is a low-rank change of a layer that shares its weight"
    return None


def _weights_obstacle(tensors: Collection[Tensor], dtypes: Dtypes) -> str | None:
    devices = {tensor.device.type for tensor in tensors}
    if len(devices) != 1 or not devices <= dtypes.keys():
        return f"it is on {', '.join(sorted(devices))}; layers are compiled on {_names(dtypes)}"
    if {type(tensor) for tensor in tensors} - {Tensor, nn.Parameter}:
        return "its weights are of a tensor subclass"
    supported = dtypes[devices.pop()]
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if unsupported := sorted(map(_name, found - {*supported})):
        return f"it has weights in {unsupported[0]}; {_names(map(_name, supported))} are compiled"
    return None


def _names(values: Iterable[str]) -> str:
    return ", ".join(values)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
