"""4-bit layers of bitsandbytes by our kernels, which read its storage in place.

No memory is added, and changes of a weight need no detection. bitsandbytes has two layouts:

    interleaved  on processors with AVX512-BF16, after the first call of a layer. Scales are rounded
                 to bfloat16. Results of the kernel have the bits of bitsandbytes 0.50, except
                 with AMX, where sums in float32 are in another order. The kernel is faster at any
                 number of rows, so it runs prompts, too.
    row-major    on other processors. bitsandbytes dequantizes the whole weight in every call. The
                 kernel multiplies by the same dequantized values, in another order.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from hf_spec_kernels.four_bit_linear import BuildError, FourBitWeight, build, four_bit_linear
from hf_spec_kernels.four_bit_linear import row_major as row_major_kernel
from hf_spec_kernels.four_bit_linear.row_major import (
    NestedScales,
    RowMajorWeight,
    row_major_four_bit_linear,
)
from torch import Tensor, nn

from hf_spec.common.logging import log_once

logger = logging.getLogger(__name__)

# Longer inputs are prompts, for which bitsandbytes dequantizes a row-major weight once.
MAX_ROWS = 64
# PEFT has classes of the same names, which add to the result.
MODULE = "bitsandbytes.nn.modules"
CLASSES = ("Linear4bit", "LinearNF4", "LinearFP4")
# Dtypes of dequantized weights. bitsandbytes runs layers that compute in float16.
ROW_MAJOR_DTYPES = (torch.float32, torch.bfloat16)


def is_four_bit(module: nn.Module) -> bool:
    """Return True for a 4-bit layer of bitsandbytes on a CPU that our kernels may run."""
    if type(module).__module__ != MODULE or type(module).__name__ not in CLASSES:
        return False
    layer: Any = module
    if layer.weight.device.type != "cpu":
        return False
    if not hasattr(layer, "support_avx512bf16_for_cpu"):
        reason: str | None = "this version of bitsandbytes has other layouts"
    elif layer.support_avx512bf16_for_cpu:
        reason = _build_error(build)
    else:
        reason = _build_error(row_major_kernel.build)
    if reason is not None:
        _log_once(reason)
    return reason is None


@functools.cache
def _build_error(build_kernel: Callable[[], object]) -> str | None:
    """Return why a kernel cannot be built; a compiler is called once."""
    try:
        build_kernel()
    except BuildError as error:
        return str(error)
    return None


def four_bit_forward(layer: Any, states: Tensor) -> Tensor | None:
    """Compute what `Linear4bit.forward` returns; None where bitsandbytes has to run.

    With AVX512-BF16, the first call is left to bitsandbytes, which rearranges the weight.
    """
    quantization: Any = getattr(layer.weight, "quant_state", None)
    if (
        quantization is None
        or not layer.compute_type_is_set
        or layer.training
        or not states.numel()
    ):
        return None
    compute = layer.compute_dtype or states.dtype
    rounded = states.to(compute)
    results = None
    if getattr(quantization, "packing_format_for_cpu", False):
        results = _interleaved(layer.weight, rounded)
    elif not layer.support_avx512bf16_for_cpu and states.numel() <= MAX_ROWS * states.shape[-1]:
        results = _row_major(layer.weight, rounded)
    if results is None:
        return None
    if layer.bias is not None:
        results += layer.bias.to(compute)
    return results.to(compute).to(states.dtype)


def four_bit_weight(layer: Any, states: torch.dtype, rows: int) -> FourBitWeight | None:
    """Return the weight for compiled layers; None where bitsandbytes or `four_bit_forward` runs."""
    quantization: Any = getattr(layer.weight, "quant_state", None)
    compute = layer.compute_dtype or states
    if (
        not getattr(quantization, "packing_format_for_cpu", False)
        or not layer.compute_type_is_set
        or not states == compute == torch.bfloat16
        or (layer.bias is not None and layer.bias.dtype != compute)
        or rows == 0
    ):
        return None
    return _interleaved_weight(layer.weight, layer.in_features)


def four_bit_storage(layer: Any) -> Tensor | None:
    """Return the codes that our kernels read in every step; None before the first call."""
    quantization: Any = getattr(layer.weight, "quant_state", None)
    arranged = getattr(quantization, "packing_format_for_cpu", False)
    return layer.weight.data if arranged or not layer.support_avx512bf16_for_cpu else None


def _interleaved(parameter: Any, states: Tensor) -> Tensor | None:
    """Return the product in the dtype of the states; None if the kernel cannot read the weight."""
    weight = _interleaved_weight(parameter, states.shape[-1])
    if weight is None:
        return None
    rounded = states.to(torch.bfloat16)
    return four_bit_linear(rounded, weight.codes, weight.scales, weight.table).to(states.dtype)


def _interleaved_weight(parameter: Any, num_inputs: int) -> FourBitWeight | None:
    quantization = parameter.quant_state
    codes, scales = parameter.data, quantization.absmax
    if 2 * codes.shape[-1] != num_inputs or scales.dtype != torch.bfloat16:
        _log_once(f"codes of shape {tuple(codes.shape)} with scales in {scales.dtype}")
        return None
    return FourBitWeight(codes, scales, _table(quantization.quant_type, torch.bfloat16))


def _row_major(parameter: Any, states: Tensor) -> Tensor | None:
    """Return the product in float32; None if the kernel cannot read the weight."""
    quantization = parameter.quant_state
    block, num_inputs = quantization.blocksize, states.shape[-1]
    codes, scales = parameter.data.view(torch.uint8), quantization.absmax
    if (
        states.dtype not in ROW_MAJOR_DTYPES
        or len(quantization.shape) != 2
        or quantization.shape[1] != num_inputs
        or 2 * codes.numel() != quantization.shape.numel()
        # Other blocks have inputs of two outputs.
        or num_inputs % block
        or block % row_major_kernel.INPUTS
        or (quantization.nested and quantization.state2.blocksize != NestedScales.BLOCK)
        or scales.dtype != (torch.uint8 if quantization.nested else torch.float32)
    ):
        _log_once(f"{states.dtype}, a weight {tuple(quantization.shape)} in blocks of {block}")
        return None
    if quantization.nested:
        outer = quantization.state2
        scales = NestedScales(scales, outer.code, outer.absmax, quantization.offset)
    weight = RowMajorWeight(
        codes.view(-1, num_inputs // 2),
        scales,
        _table(quantization.quant_type, torch.float32),
        block,
        states.dtype,
    )
    return row_major_four_bit_linear(states.float(), weight)


@functools.cache
def _table(quant_type: str, dtype: torch.dtype) -> Tensor:
    from bitsandbytes.functional import get_4bit_type

    return get_4bit_type(quant_type, device="cpu").to(dtype)


def _log_once(reason: str) -> None:
    log_once(logger, logging.INFO, f"4-bit layers are run by bitsandbytes: {reason}")
