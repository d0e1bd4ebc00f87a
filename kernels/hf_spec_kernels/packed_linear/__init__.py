"""Linear layers of a few rows on a CPU, with weights in the order in which memory hands them out.

At few rows a product takes as long as reading the weight. A result depends on its row alone: each
is summed up from the first input to the last, whatever else is in the batch.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.dispatch import CPU_DTYPES, launches

__all__ = ["BuildError", "PackedWeight", "pack_weight", "packed_linear"]

# Four tensors, their sizes, and the number of threads.
_SIGNATURE = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 3, ctypes.c_int]


@dataclass(frozen=True)
class PackedWeight:
    """A weight of (N, K), as `packed_linear` reads it.

    Attributes:
        blocks: (ceil(N / b), ceil(K / i), b, i), the weights of b outputs for i inputs, then for
            the next ones; zeros after the last output and input. The processor decides on b and i.
        num_outputs, num_inputs: N and K.
    """

    blocks: Tensor
    num_outputs: int
    num_inputs: int

    @property
    def nbytes(self) -> int:
        """Memory in bytes."""
        return self.blocks.nbytes

    def unpacked(self) -> Tensor:
        """The (N, K) weight."""
        whole = self.blocks.transpose(1, 2).flatten(2).flatten(0, 1)
        return whole[: self.num_outputs, : self.num_inputs]


def pack_weight(weight: Tensor) -> PackedWeight:
    """Arrange a copy of an (N, K) weight for `packed_linear`.

    float32 or bfloat16 on the CPU; all else is a `TypeError`. Where the kernel cannot be built it
    is a `BuildError`.
    """
    if weight.dtype not in CPU_DTYPES or weight.device.type != "cpu":
        raise TypeError(
            f"a weight of {weight.dtype} on {weight.device}; the kernel takes "
            f"{' and '.join(map(str, CPU_DTYPES))} on the CPU"
        )
    library, (num_outputs, num_inputs) = _library(), weight.shape
    size, together = library.block_size(), getattr(library, f"inputs_{CPU_DTYPES[weight.dtype]}")()
    padded = F.pad(weight, (0, -num_inputs % together, 0, -num_outputs % size))
    blocks = padded.view(-1, size, padded.shape[1] // together, together)
    return PackedWeight(blocks.transpose(1, 2).contiguous(), num_outputs, num_inputs)


def packed_linear(
    states: Tensor, weight: PackedWeight, bias: Tensor | None = None, impl: str = "auto"
) -> Tensor:
    """`F.linear` with a packed weight; no gradients.

    Sums are float32, rounded to the dtype at the end.

    Args:
        states: (..., K), on the CPU and of the weight's dtype.
        weight: from `pack_weight`.
        bias: (N,), contiguous, likewise, or None.
        impl: "auto" is the kernel, "torch" the reference.

    Returns:
        (..., N), contiguous.

    Raises:
        TypeError, ValueError: for tensors that do not fit together.
    """
    blocks, num_outputs, num_inputs = weight.blocks, weight.num_outputs, weight.num_inputs
    if impl not in ("auto", "torch"):
        raise ValueError(f"impl={impl!r}; choose auto, torch")
    if states.dtype != blocks.dtype or states.device != blocks.device:
        raise TypeError(
            f"states of {states.dtype} on {states.device} with a weight of {blocks.dtype} on "
            f"{blocks.device}"
        )
    if states.shape[-1] != num_inputs:
        raise ValueError(f"states of width {states.shape[-1]} with a weight of {num_inputs} inputs")
    if bias is not None and (bias.dtype != blocks.dtype or bias.shape != (num_outputs,)):
        raise ValueError(
            f"a bias of {bias.dtype}, {tuple(bias.shape)} with a weight of {blocks.dtype} and "
            f"{num_outputs} outputs"
        )
    if impl == "torch":
        return F.linear(states, weight.unpacked(), bias)
    states = states.contiguous()
    results = states.new_empty(*states.shape[:-1], num_outputs)
    getattr(_library(), f"linear_{CPU_DTYPES[blocks.dtype]}")(
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


@cache
def _library() -> ctypes.CDLL:
    library = load(Path(__file__).with_name("kernel.cpp"))
    for name in CPU_DTYPES.values():
        function = getattr(library, f"linear_{name}")
        function.argtypes, function.restype = _SIGNATURE, None
    return library
