"""Linear layers of a few rows on a CPU, with 4-bit weights as bitsandbytes stores them.

On processors with AVX512-BF16 bitsandbytes rearranges 4-bit weights in their first call. The kernel
reads that layout, so it needs no copy. A weight is the product of a table entry and the scale of
its block, both in bfloat16. Each result is summed in float32 in the same order for any number of
rows, so its bits depend on its row only. `row_major` reads the storage of other processors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.dispatch import launches
from hf_spec_kernels.four_bit_linear import reference

__all__ = ["BuildError", "FourBitWeight", "build", "four_bit_linear", "multiplier"]

SOURCE = Path(__file__).with_name("kernel.cpp")


class _Arrays(ctypes.Structure):
    """`FourBitWeight` of the C++."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "table")),
        ("block", ctypes.c_int64),
    )


@dataclass(frozen=True)
class FourBitWeight:
    """An (N, K) weight for other C++ to multiply by; see `four_bit_linear` for its tensors."""

    codes: Tensor
    scales: Tensor
    table: Tensor

    @cached_property
    def arrays(self) -> ctypes.Structure:
        """Addresses of the tensors, valid as long as this object."""
        block = 2 * self.codes.shape[1] // len(self.scales)
        tensors = (self.codes, self.scales, self.table)
        return _Arrays(*(tensor.data_ptr() for tensor in tensors), block)


def four_bit_linear(
    states: Tensor, codes: Tensor, scales: Tensor, table: Tensor, impl: str = "auto"
) -> Tensor:
    """Compute a linear layer without bias.

    Args:
        states: (..., K) bfloat16, on the CPU.
        codes: (N, K / 2) uint8, contiguous. The codes of 32 outputs by two inputs take 32 bytes,
            those of the first 16 outputs in the low halves.
        scales: (K / b, N) bfloat16, contiguous, for blocks of b inputs; b is even.
        table: (16,) bfloat16, contiguous, the values of the codes.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N) bfloat16, contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
        BuildError: if the kernel cannot be built.
    """
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}; choose auto, torch")
    dtypes = [tensor.dtype for tensor in (states, codes, scales, table)]
    if dtypes != [torch.bfloat16, torch.uint8, torch.bfloat16, torch.bfloat16]:
        raise TypeError(
            f"states, codes, scales and table in {', '.join(map(str, dtypes))}; the kernel takes "
            "torch.uint8 codes and torch.bfloat16"
        )
    if {tensor.device.type for tensor in (states, codes, scales, table)} != {"cpu"}:
        raise TypeError("the tensors of a 4-bit linear layer must be on the CPU")
    num_inputs = states.shape[-1]
    num_outputs, num_blocks = len(codes), len(scales)
    if (
        codes.shape != (num_outputs, num_inputs // 2)
        or scales.shape != (num_blocks, num_outputs)
        or table.shape != (16,)
        or num_outputs % reference.OUTPUTS
        or not num_inputs
        or num_inputs % (2 * num_blocks)
        or not (codes.is_contiguous() and scales.is_contiguous() and table.is_contiguous())
    ):
        raise ValueError(
            f"states of width {num_inputs} with codes {tuple(codes.shape)}, scales "
            f"{tuple(scales.shape)} and a table {tuple(table.shape)}; N must be a multiple of "
            f"{reference.OUTPUTS} and K of an even block"
        )
    if impl == "torch":
        return reference.four_bit_linear(states, codes, scales, table)
    states = states.contiguous()
    results = states.new_empty(*states.shape[:-1], num_outputs)
    build()(
        states.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        table.data_ptr(),
        results.data_ptr(),
        states.numel() // num_inputs,
        num_inputs,
        num_outputs,
        num_inputs // num_blocks,
        torch.get_num_threads(),
    )
    launches["four_bit_linear"] += 1
    return results


def multiplier() -> int:
    """Return the address of the kernel for a `FourBitWeight`, for other C++ to call.

    Raises:
        BuildError: if it cannot be built.
    """
    function = load(SOURCE).four_bit_multiply
    return ctypes.cast(function, ctypes.c_void_p).value or 0


@cache
def build() -> ctypes._NamedFuncPointer:
    """Build the kernel on the first call; return its C++ function.

    Raises:
        BuildError: if it cannot be built.
    """
    function = load(SOURCE).four_bit_linear
    function.argtypes = [*[ctypes.c_void_p] * 5, *[ctypes.c_int64] * 4, ctypes.c_int]
    function.restype = None
    return function
