"""Weights that do not simply lie in memory: offloaded, cut up among processes, or quantised.

Accelerate keeps the weights of an offloaded layer elsewhere and brings them for a call, tensor
parallelism gives every process a part of them, and a quantised layer has a code of its own.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from hf_spec.common.errors import UnsupportedError


def execution_device(module: nn.Module) -> torch.device:
    """Where `module` computes: where its weights are, or where they are brought for a call."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            # Accelerate takes the number of a GPU, too.
            if (place := getattr(one, "execution_device", None)) is not None:
                return torch.device(place)
    return device


def weight_rows(layer: Any, rows: Tensor | None = None) -> Tensor:
    """(R, width) rows of the weight of an embedding or a linear layer, from wherever they are.

    All of them without `rows`, (R,) int64. With tensor parallelism every process must ask. A
    quantised layer is refused.
    """
    if is_quantised(layer):
        raise UnsupportedError(
            f"the target's {type(layer).__name__} is quantised, and its weights are needed as they "
            "are; leave embedding and head out of the quantisation"
        )
    with align_module_device(layer):
        weight = layer.weight.detach()
        gather: Any = getattr(weight, "full_tensor", None)
        weight = weight if gather is None else gather()
        return weight if rows is None else weight[rows.to(weight.device)]


def dense_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy of a module in memory, without PEFT's layers, its quantised ones as `nn.Linear`."""
    copied = _without_tuners(copy.deepcopy(module))
    if is_quantised(copied):
        return _as_linear(copied, dtype)
    for name, layer in list(copied.named_modules()):
        if is_quantised(layer):
            copied.set_submodule(name, _as_linear(layer, dtype))
    return copied


def _without_tuners(module: nn.Module) -> nn.Module:
    """Take what PEFT put around layers off them again."""
    inner = getattr(module, "get_base_layer", None)
    if callable(inner):
        return inner()
    for name, child in list(module.named_children()):
        setattr(module, name, _without_tuners(child))
    return module


def is_quantised(layer: nn.Module) -> bool:
    """Whether `layer` is linear and keeps something else than a weight of numbers."""
    weight = getattr(layer, "weight", None)
    plain = isinstance(weight, Tensor) and weight.is_floating_point()
    return hasattr(layer, "in_features") and hasattr(layer, "out_features") and not plain


def looks_for_outliers(layer: Any) -> bool:
    """True if `layer` is an 8-bit layer of bitsandbytes that computes some columns unquantized.

    Which columns depends on the input, so the host waits for the device in every call (Dettmers et
    al. 2022, arXiv 2208.07339, section 3.2).
    """
    return type(layer).__name__ == "Linear8bitLt" and layer.state.threshold > 0


@torch.no_grad()
def _as_linear(layer: Any, dtype: torch.dtype) -> nn.Linear:
    """What a linear layer says of the unit vectors is its weight, whatever it keeps."""
    units = torch.eye(layer.in_features, dtype=dtype, device=next(layer.parameters()).device)
    bias = getattr(layer, "bias", None)
    columns = layer(units) if bias is None else layer(units) - bias
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
    linear.weight = nn.Parameter(columns.T.to(dtype).contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(dtype))
    return linear
