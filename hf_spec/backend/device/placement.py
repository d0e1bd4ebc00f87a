"""Access to weights that are offloaded, sharded over processes, or quantized.

Accelerate loads the weights of an offloaded layer for each call, tensor parallelism gives every
process a shard, and quantized layers have formats of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn

from hf_spec.common.errors import UnsupportedError


def execution_device(module: nn.Module) -> torch.device:
    """Return the device on which `module` computes, also if its weights are offloaded."""
    device = next(module.parameters()).device
    if device.type != "meta":
        return device
    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for part_hook in getattr(hook, "hooks", (hook,)):
            # Accelerate also accepts the index of a GPU.
            if (target := getattr(part_hook, "execution_device", None)) is not None:
                return torch.device(target)
    return device


def weight_rows(layer: Any, rows: Tensor | None = None) -> Tensor:
    """Return (R, width) rows of the weight of an embedding or linear layer.

    `rows` is (R,) int64; all rows by default. With tensor parallelism every process must call this.

    Raises:
        UnsupportedError: for a quantized layer.
    """
    if is_quantized(layer):
        raise UnsupportedError(
            f"the target's {type(layer).__name__} is quantized, but its unquantized weights are "
            "needed; exclude embedding and head from quantization"
        )
    with align_module_device(layer):
        weight = layer.weight.detach()
        gather: Any = getattr(weight, "full_tensor", None)
        weight = weight if gather is None else gather()
        return weight if rows is None else weight[rows.to(weight.device)]


def dense_copy(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Return a copy of a module without PEFT layers, with quantized layers as `nn.Linear`."""
    copied = _without_tuners(copy.deepcopy(module))
    if is_quantized(copied):
        return _as_linear(copied, dtype)
    for name, layer in list(copied.named_modules()):
        if is_quantized(layer):
            copied.set_submodule(name, _as_linear(layer, dtype))
    return copied


def _without_tuners(module: nn.Module) -> nn.Module:
    inner = getattr(module, "get_base_layer", None)
    if callable(inner):
        return inner()
    for name, child in list(module.named_children()):
        setattr(module, name, _without_tuners(child))
    return module


def is_quantized(layer: nn.Module) -> bool:
    """Return True for a linear layer whose weight is not a floating-point tensor."""
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
    """Return an `nn.Linear` that computes the same; the weight is the output for unit vectors."""
    units = torch.eye(layer.in_features, dtype=dtype, device=next(layer.parameters()).device)
    bias = getattr(layer, "bias", None)
    columns = layer(units) if bias is None else layer(units) - bias
    with torch.device("meta"):
        linear = nn.Linear(layer.in_features, layer.out_features, bias=False)
    linear.weight = nn.Parameter(columns.T.to(dtype).contiguous())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().to(dtype))
    return linear


@contextmanager
def host_default() -> Iterator[None]:
    """Create tensors without a device on the host, whatever `torch.set_default_device` set."""
    if torch.get_default_device().type == "cpu":
        yield
        return
    with torch.device("cpu"):
        yield
