"""Linear layers of a few rows on a CPU, with 8-bit weights in the storage of their libraries.

Each of N outputs has a scale and K codes in a row; nothing is copied. Sums of products in float32
are in an order of their own, so the bits of a result depend on its row only. Sums of integers are
exact.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor

from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.dispatch import CPU_DTYPES, launches
from hf_spec_kernels.eight_bit_linear import reference

__all__ = [
    "INPUTS",
    "BuildError",
    "EightBitWeight",
    "build",
    "dynamic_linear",
    "multiplier",
    "weight_only_linear",
]

SOURCE = Path(__file__).with_name("kernel.cpp")

# K is a multiple of this.
INPUTS = 64


class _Arrays(ctypes.Structure):
    """`EightBitWeight` of the C++."""

    _fields_ = (
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("threshold", ctypes.c_float),
    )


@dataclass(frozen=True)
class EightBitWeight:
    """An (N, K) weight for other C++ to multiply by; see `dynamic_linear` for its attributes."""

    codes: Tensor
    scales: Tensor
    threshold: float

    @cached_property
    def arrays(self) -> ctypes.Structure:
        """Addresses of the tensors, valid as long as this object."""
        return _Arrays(self.codes.data_ptr(), self.scales.data_ptr(), self.threshold)


def weight_only_linear(states: Tensor, codes: Tensor, scales: Tensor, impl: str = "auto") -> Tensor:
    """Compute a linear layer without bias as torchao does: sums are rounded before they are scaled.

    Args:
        states: (..., K) float32 or bfloat16, on the CPU.
        codes: (N, K) int8, contiguous.
        scales: (N,) float32, contiguous.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N) in the dtype of the states, contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
        BuildError: if the kernel cannot be built.
    """
    _check(states, codes, scales, impl)
    if impl == "torch":
        return reference.weight_only_linear(states, codes, scales)
    states, results = _prepare(states, codes)
    build(f"weight_only_{CPU_DTYPES[states.dtype]}")(
        states.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        results.data_ptr(),
        states.numel() // states.shape[-1],
        states.shape[-1],
        len(codes),
        torch.get_num_threads(),
    )
    launches["eight_bit_linear"] += 1
    return results


def dynamic_linear(
    states: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None = None,
    threshold: float = 0.0,
    impl: str = "auto",
) -> Tensor:
    """Compute a linear layer with quantized states (LLM.int8()), row by row.

    Every row has the result that bitsandbytes computes for this row alone; there, an outlier in one
    row affects the others of the batch.

    Args:
        states: (..., K) float32 or bfloat16, on the CPU.
        codes: (N, K) int8, contiguous.
        scales: (N,) float32, contiguous; the largest weight of every output.
        bias: (N,) in the dtype of the states, contiguous.
        threshold: states of at least this size are not quantized; 0 for none.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N) in the dtype of the states, contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
        BuildError: if the kernel cannot be built.
    """
    _check(states, codes, scales, impl)
    if bias is not None and (bias.dtype != states.dtype or bias.shape != scales.shape):
        raise ValueError(f"a bias of {bias.dtype}, {tuple(bias.shape)} for {len(codes)} outputs")
    if impl == "torch":
        return reference.dynamic_linear(states, codes, scales, bias, threshold)
    states, results = _prepare(states, codes)
    build(f"dynamic_{CPU_DTYPES[states.dtype]}")(
        states.data_ptr(),
        codes.data_ptr(),
        scales.data_ptr(),
        None if bias is None else bias.data_ptr(),
        results.data_ptr(),
        states.numel() // states.shape[-1],
        states.shape[-1],
        len(codes),
        threshold,
        torch.get_num_threads(),
    )
    launches["eight_bit_linear"] += 1
    return results


def _check(states: Tensor, codes: Tensor, scales: Tensor, impl: str) -> None:
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}; choose auto, torch")
    dtypes = states.dtype, codes.dtype, scales.dtype
    if states.dtype not in CPU_DTYPES or dtypes[1:] != (torch.int8, torch.float32):
        raise TypeError(
            f"states, codes and scales in {', '.join(map(str, dtypes))}; the kernel takes states "
            "in float32 or bfloat16, int8 codes, and float32 scales"
        )
    if {tensor.device.type for tensor in (states, codes, scales)} != {"cpu"}:
        raise TypeError("the tensors of an 8-bit linear layer must be on the CPU")
    num_inputs = states.shape[-1]
    if (
        codes.shape != (len(codes), num_inputs)
        or scales.shape != (len(codes),)
        or not num_inputs
        or num_inputs % INPUTS
        or not (codes.is_contiguous() and scales.is_contiguous())
    ):
        raise ValueError(
            f"states of width {num_inputs}, codes {tuple(codes.shape)}, scales "
            f"{tuple(scales.shape)}; K must be a multiple of {INPUTS}, with a scale per output"
        )


def _prepare(states: Tensor, codes: Tensor) -> tuple[Tensor, Tensor]:
    states = states.contiguous()
    return states, states.new_empty(*states.shape[:-1], len(codes))


def multiplier() -> int:
    """Return the address of the kernel for an `EightBitWeight` in bfloat16, for other C++ to call.

    Raises:
        BuildError: if it cannot be built.
    """
    return ctypes.cast(load(SOURCE).dynamic_multiply, ctypes.c_void_p).value or 0


@cache
def build(name: str = "dynamic_float32") -> ctypes._NamedFuncPointer:
    """Build the kernel on the first call; return the C++ function of this name.

    Raises:
        BuildError: if it cannot be built.
    """
    function: ctypes._NamedFuncPointer
    function = getattr(load(SOURCE), name)
    if name.startswith("dynamic"):
        sizes = [*[ctypes.c_int64] * 3, ctypes.c_float, ctypes.c_int]
        function.argtypes = [*[ctypes.c_void_p] * 5, *sizes]
    else:
        function.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]
    function.restype = None
    return function
