"""Linear layers of a few rows on a CPU, with 4-bit weights in the storage of bitsandbytes.

A weight is the product of a table entry and the scale of its block, rounded to the dtype in which
bitsandbytes computes. Sums are in float32, and their bits depend on their row only.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.dispatch import CPU_DTYPES, launches
from hf_spec_kernels.four_bit_linear import reference
from hf_spec_kernels.four_bit_linear.reference import NestedScales, RowMajorWeight

__all__ = ["BuildError", "NestedScales", "RowMajorWeight", "build", "row_major_four_bit_linear"]

# A step of the widest registers has this many inputs.
INPUTS = 32
# Tensors, sizes, and the number of threads.
_SIGNATURE = [*[ctypes.c_void_p] * 8, *[ctypes.c_int64] * 4, ctypes.c_int]


def row_major_four_bit_linear(states: Tensor, weight: RowMajorWeight, impl: str = "auto") -> Tensor:
    """Compute a linear layer without bias.

    Args:
        states: (..., K) float32, on the CPU.
        weight: N outputs by K inputs.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N) float32, contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
        BuildError: if the kernel cannot be built.
    """
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}; choose auto, torch")
    num_inputs, num_outputs = states.shape[-1], len(weight.codes)
    _check(states, weight)
    if impl == "torch":
        return reference.row_major_four_bit_linear(states, weight)
    states = states.contiguous()
    results = states.new_empty(*states.shape[:-1], num_outputs)
    build(weight.dtype)(
        states.data_ptr(),
        weight.codes.data_ptr(),
        *_addresses(weight.scales),
        weight.table.data_ptr(),
        results.data_ptr(),
        states.numel() // num_inputs,
        num_inputs,
        num_outputs,
        weight.block_size,
        torch.get_num_threads(),
    )
    launches["four_bit_linear"] += 1
    return results


def _check(states: Tensor, weight: RowMajorWeight) -> None:
    scales = weight.scales
    nested = scales if isinstance(scales, NestedScales) else None
    floats = [states, weight.table]
    floats += [nested.absmax, nested.table, nested.offset] if nested else [scales]
    codes = [weight.codes, *([nested.codes] if nested else [])]
    if {(t.dtype, t.device.type) for t in floats} != {(torch.float32, "cpu")}:
        raise TypeError("states, scales and table must be torch.float32 on the CPU")
    if {(t.dtype, t.device.type) for t in codes} != {(torch.uint8, "cpu")}:
        raise TypeError("codes must be torch.uint8 on the CPU")
    if weight.dtype not in CPU_DTYPES:
        raise TypeError(f"a weight in {weight.dtype}; the kernel takes float32, bfloat16")
    inputs, block = states.shape[-1], weight.block_size
    num_scales = weight.codes.numel() * 2 // block if block > 0 else 0
    fits = (
        weight.codes.shape == (len(weight.codes), inputs // 2)
        and weight.table.shape == (16,)
        and inputs > 0
        and block > 0
        and inputs % block == block % INPUTS == 0
        and all(t.is_contiguous() for t in (*floats[1:], *codes))
    )
    if nested:
        shapes = (nested.codes.shape, nested.absmax.shape, nested.table.shape, nested.offset.shape)
        fits &= shapes == ((num_scales,), (-(-num_scales // NestedScales.BLOCK),), (256,), ())
    elif isinstance(scales, Tensor):
        fits &= scales.shape == (num_scales,)
    if not fits:
        raise ValueError(
            f"states of width {inputs}, codes {tuple(weight.codes.shape)} in blocks of {block}; "
            f"K must be a multiple of the block and the block of {INPUTS}, with a scale per block"
        )


def _addresses(scales: Tensor | NestedScales) -> tuple[int | None, ...]:
    if isinstance(scales, Tensor):
        return scales.data_ptr(), None, None, None
    parts = scales.absmax, scales.codes, scales.table, scales.offset
    return tuple(part.data_ptr() for part in parts)


@cache
def build(dtype: torch.dtype = torch.float32) -> ctypes._NamedFuncPointer:
    """Build the kernels on the first call; return the C++ function for weights of a dtype.

    Raises:
        BuildError: if they cannot be built.
    """
    library = load(Path(__file__).with_name("row_major.cpp"))
    function: ctypes._NamedFuncPointer = getattr(library, f"linear_{CPU_DTYPES[dtype]}")
    function.argtypes = _SIGNATURE
    function.restype = None
    return function
