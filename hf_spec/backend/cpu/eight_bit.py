"""8-bit layers of bitsandbytes and torchao by our kernels, which read their storage in place.

    Linear8bitLt           bitsandbytes quantizes the inputs of every call, except outliers, and
                           multiplies integers. Results for a row have its bits without outliers;
                           those that outliers add are summed in another order.
    Int8WeightOnlyConfig   torchao converts the whole weight in every call. The kernel computes the
                           same sums in another order.

In bitsandbytes, an outlier of one row changes how the other rows of a call are rounded. The kernel
computes each row by itself, so that a draft does not affect the tokens before it. Prompts are left
to bitsandbytes.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from hf_spec_kernels.dispatch import CPU_DTYPES
from hf_spec_kernels.eight_bit_linear import (
    INPUTS,
    BuildError,
    EightBitWeight,
    build,
    dynamic_linear,
    weight_only_linear,
)
from torch import Tensor, nn

logger = logging.getLogger(__name__)

# Longer inputs are prompts, which the libraries run.
MAX_ROWS = 64


def is_eight_bit(module: nn.Module) -> bool:
    """Return True for an 8-bit layer on a CPU that our kernels may run."""
    if not (is_dynamic(module) or _is_weight_only(module)):
        return False
    layer: Any = module
    return layer.weight.device.type == "cpu" and layer.in_features % INPUTS == 0 and _is_built()


def eight_bit_forward(layer: Any, states: Tensor, prompt: bool = False) -> Tensor | None:
    """Compute what the layer's forward returns; None where its library has to run.

    The first call of a layer is left to bitsandbytes, which moves the weight, and so are prompts.
    """
    if (
        states.dtype not in CPU_DTYPES
        or states.shape[-1] != layer.in_features
        or not 0 < states.numel() <= MAX_ROWS * states.shape[-1]
    ):
        return None
    if _is_weight_only(layer):
        weight = layer.weight
        results = weight_only_linear(states, weight.qdata, weight.scale.view(-1))
        if layer.bias is not None:
            results += layer.bias
        return results
    if prompt or not _is_ready(layer, states.dtype):
        return None
    state = layer.state
    return dynamic_linear(states, state.CB, state.SCB, layer.bias, state.threshold)


def eight_bit_weight(
    layer: Any, states: torch.dtype, rows: int, prompt: bool = False
) -> EightBitWeight | None:
    """Return the weight for compiled layers; None where bitsandbytes or `eight_bit_forward` runs.

    In float32 a compiled layer rounds otherwise, and quantized inputs would differ by whole steps.
    """
    if prompt or states != torch.bfloat16 or not 0 < rows <= MAX_ROWS:
        return None
    if not _is_ready(layer, states):
        return None
    return EightBitWeight(layer.state.CB, layer.state.SCB, layer.state.threshold)


def eight_bit_storage(layer: Any) -> Tensor | None:
    """Return the codes that our kernels read in every step; None before the first call."""
    codes: Tensor | None = layer.weight.qdata if _is_weight_only(layer) else layer.state.CB
    return codes


def _is_ready(layer: Any, dtype: torch.dtype) -> bool:
    """Return True if bitsandbytes has moved the weight, and the kernel can read it."""
    state, bias = layer.state, layer.bias
    return (
        not layer.training
        and not state.has_fp16_weights
        and state.CB is not None
        and state.CB.dtype == torch.int8
        and state.CB.is_contiguous()
        and (bias is None or bias.dtype == dtype)
    )


def is_dynamic(module: nn.Module) -> bool:
    """Return True for an 8-bit layer of bitsandbytes."""
    # PEFT has a class of the same name, which adds to the result.
    kind = type(module)
    return (kind.__module__, kind.__name__) == ("bitsandbytes.nn.modules", "Linear8bitLt")


def _is_weight_only(module: nn.Module) -> bool:
    weight: Any = module._parameters.get("weight")
    if type(module) is not nn.Linear or type(weight).__name__ != "Int8Tensor":
        return False
    # Without scales of groups of inputs and without quantized inputs.
    return (
        type(weight).__module__.startswith("torchao.")
        and [*weight.block_size] == [1, module.in_features]
        and weight.act_quant_kwargs is None
        and weight.act_pre_scale is None
        and weight.qdata.is_contiguous()
        and weight.scale.dtype == torch.float32
        and (module.bias is None or module.bias.dtype == weight.dtype)
    )


@functools.cache
def _is_built() -> bool:
    """Return True if the kernels can be built; a compiler is called once."""
    try:
        build()
    except BuildError as error:
        logger.info("8-bit layers are run by their libraries: %s", error)
        return False
    return True
