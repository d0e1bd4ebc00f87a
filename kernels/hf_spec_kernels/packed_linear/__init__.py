"""Linear layers of a few rows on a CPU, with weights packed for sequential reads.

With few rows a GEMM is memory-bound: it takes as long as reading the weight. Each result is summed
from the first input to the last, so its bits depend on its row only, not on the batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_spec_kernels import huge_pages
from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.dispatch import CPU_DTYPES, launches

__all__ = ["BuildError", "PackedWeight", "pack_weight", "packed_linear"]

# (dtype of states, dtype of weights) -> suffix of the C++ functions.
_NAMES = {
    **{(dtype, dtype): name for dtype, name in CPU_DTYPES.items()},
    (torch.float32, torch.bfloat16): "float32_by_bfloat16",
    (torch.float32, torch.int8): "float32_by_int8",
}
# Four tensors, their sizes, and the number of threads.
_SIGNATURE = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]


@dataclass(frozen=True)
class PackedWeight:
    """An (N, K) weight, packed for `packed_linear`.

    Attributes:
        blocks: (ceil(N / b), ceil(K / i), b, i), blocks of b outputs by i inputs, padded with
            zeros. b and i depend on the processor.
        num_outputs, num_inputs: N and K.
        dtype: dtype of the states.
    """

    blocks: Tensor
    num_outputs: int
    num_inputs: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.blocks.nbytes

    @cached_property
    def kernel(self) -> ctypes._NamedFuncPointer:
        """The C++ function for this weight."""
        function: ctypes._NamedFuncPointer
        function = getattr(_library(), f"linear_{_NAMES[self.dtype, self.blocks.dtype]}")
        return function

    def unpacked(self) -> Tensor:
        """Return the (N, K) weight."""
        whole = self.blocks.transpose(1, 2).flatten(2).flatten(0, 1)
        return whole[: self.num_outputs, : self.num_inputs]


def pack_weight(weight: Tensor, states: torch.dtype | None = None) -> PackedWeight:
    """Arrange a copy of an (N, K) weight for `packed_linear`.

    Args:
        weight: float32, bfloat16 or int8, on the CPU.
        states: dtype of the states, the weight's by default. Weights in bfloat16 also support
            states in float32, which processors with bfloat16 instructions round; weights in int8
            support those alone, and do not round them.

    Raises:
        TypeError: for other dtypes or devices.
        BuildError: if the kernel cannot be built.
    """
    states = weight.dtype if states is None else states
    if (states, weight.dtype) not in _NAMES or weight.device.type != "cpu":
        raise TypeError(
            f"a weight of {weight.dtype} on {weight.device} for states of {states}; the kernel "
            "takes torch.float32 and torch.bfloat16 on the CPU, and float32 by bfloat16 or int8"
        )
    library, (num_outputs, num_inputs) = _library(), weight.shape
    size = library.block_size()
    name = _NAMES[states, weight.dtype]
    together = getattr(library, f"inputs_{name}")()
    multiple = getattr(library, f"multiple_{name}")()
    padded = F.pad(weight, (0, -num_inputs % multiple, 0, -num_outputs % size))
    blocks = padded.view(-1, size, padded.shape[1] // together, together)
    blocks = blocks.transpose(1, 2)
    packed = huge_pages.empty(blocks.shape, blocks.dtype).copy_(blocks)
    return PackedWeight(packed, num_outputs, num_inputs, states)


def packed_linear(
    states: Tensor, weight: PackedWeight, bias: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """Compute `F.linear` with a packed weight, without gradients; sums are float32.

    Args:
        states: (..., K), on the CPU, in the dtype that the weight was packed for.
        weight: from `pack_weight`.
        bias: (N,), contiguous, in the dtype of the states, or None.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N), contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
    """
    blocks, num_outputs, num_inputs = weight.blocks, weight.num_outputs, weight.num_inputs
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}; choose auto, torch")
    if states.dtype != weight.dtype or states.device != blocks.device:
        raise TypeError(
            f"states of {states.dtype} on {states.device} with a weight for {weight.dtype} on "
            f"{blocks.device}"
        )
    if states.shape[-1] != num_inputs:
        raise ValueError(f"states of width {states.shape[-1]} with a weight of {num_inputs} inputs")
    if bias is not None and (bias.dtype != states.dtype or bias.shape != (num_outputs,)):
        raise ValueError(
            f"a bias of {bias.dtype}, {tuple(bias.shape)} with states of {states.dtype} and "
            f"{num_outputs} outputs"
        )
    if impl == "torch":
        return F.linear(states, weight.unpacked().to(states.dtype), bias)
    states = states.contiguous()
    results = states.new_empty(*states.shape[:-1], num_outputs)
    weight.kernel(
        states.data_ptr(),
        blocks.data_ptr(),
        None if bias is None else bias.data_ptr(),
        results.data_ptr(),
        results.numel() // num_outputs,
        num_inputs,
        num_outputs,
        torch.get_num_threads(),
    )
    launches["packed_linear"] += 1
    return results


def multiplier(weight: PackedWeight) -> int:
    """Return the address of the kernel for a weight, for other C++ to call."""
    return ctypes.cast(weight.kernel, ctypes.c_void_p).value or 0


@cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_name("kernel.cpp"))
    for name in _NAMES.values():
        function = getattr(library, f"linear_{name}")
        function.argtypes, function.restype = _SIGNATURE, None
    return library
