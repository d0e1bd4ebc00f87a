"""Compiled decoder layers: generated C++ and the structures that it is called with.

The C++ computes norms, rotary embeddings and sums, and calls the kernels of `packed_linear`,
`kv_write` and `ragged_tree_attention`. The structures mirror those of `layer.h`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from hf_spec_kernels import eight_bit_linear, four_bit_linear
from hf_spec_kernels.build import BuildError, load
from hf_spec_kernels.eight_bit_linear import EightBitWeight
from hf_spec_kernels.four_bit_linear import FourBitWeight
from hf_spec_kernels.kv_write import cpu as kv_write
from hf_spec_kernels.packed_linear import PackedWeight, multiplier
from hf_spec_kernels.ragged_tree_attention import cpu as ragged_tree_attention

__all__ = ["Attention", "BuildError", "Call", "Storage", "Weight", "build_layer", "weight_of"]

# Generated code is compiled as if it were in this file.
SOURCE = Path(__file__).with_name("decoder_layer.cpp")


class Weight(ctypes.Structure):
    """A weight and the kernel that reads it."""

    _fields_ = (("multiply", ctypes.c_void_p), ("numbers", ctypes.c_void_p))


class Storage(ctypes.Structure):
    """A buffer of keys or values."""

    _fields_ = (
        ("numbers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("slot", "head", "entry")),
    )

    def point_to(self, buffer: torch.Tensor) -> None:
        """Point to (S, H, C, D) keys or values."""
        self.numbers = buffer.data_ptr()
        self.slot, self.head, self.entry, _ = buffer.stride()


class Attention(ctypes.Structure):
    """Kernels and KV buffers of a layer's attention; `window` and `chunk` are 0 for none."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("write", "attend")),
        ("keys", Storage),
        ("values", Storage),
        ("window", ctypes.c_int64),
        ("chunk", ctypes.c_int64),
    )

    @classmethod
    def of(cls, dtype: torch.dtype) -> Attention:
        """Return the structure with the kernels of a dtype.

        Raises:
            BuildError: if they cannot be built.
        """
        return cls(kv_write.address(), ragged_tree_attention.address(dtype))


class Call(ctypes.Structure):
    """Arguments of one call; see `Call` in `layer.h`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("inputs", "outputs", "slot_mapping", "layout")),
        *((name, ctypes.c_int64) for name in ("tokens", "threads")),
    )


def weight_of(weight: PackedWeight | FourBitWeight | EightBitWeight | torch.Tensor) -> Weight:
    """Return the structure of a packed or quantized weight, or of a contiguous (N, K) weight."""
    if isinstance(weight, EightBitWeight):
        return Weight(eight_bit_linear.multiplier(), ctypes.addressof(weight.arrays))
    if isinstance(weight, FourBitWeight):
        return Weight(four_bit_linear.multiplier(), ctypes.addressof(weight.arrays))
    if isinstance(weight, PackedWeight):
        return Weight(multiplier(weight), weight.blocks.data_ptr())
    return Weight(None, weight.data_ptr())


def build_layer(text: str) -> Callable[..., None]:
    """Build the C++ of a layer; return its function `run(constants, weights, attention, call)`.

    `constants` is an array of addresses and `weights` one of `Weight`; `attention` and `call` point
    to an `Attention`, or None, and a `Call`.

    Raises:
        BuildError: if the C++ cannot be built.
    """
    function = load(SOURCE, text).run
    function.argtypes = [ctypes.c_void_p] * 4
    function.restype = None
    return function
