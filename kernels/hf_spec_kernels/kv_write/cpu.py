"""Caller of the C++ kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from torch import Tensor

from hf_spec_kernels.build import load
from hf_spec_kernels.dispatch import launches

SOURCE = Path(__file__).with_name("kernel.cpp")
_ADDRESS, _INT = ctypes.c_void_p, ctypes.c_int64
_SIGNATURE = (_ADDRESS, _INT, _INT, _ADDRESS, _INT, _INT, _INT, _ADDRESS, _INT, _INT, _INT)


def kv_write(
    key: Tensor, value: Tensor, keys: Tensor, values: Tensor, slot_mapping: Tensor
) -> None:
    """Run the kernel; see the package's function."""
    launches["kv_write"] += 1
    for states, pool in ((key, keys), (value, values)):
        num_tokens, num_heads, width = states.shape
        size = states.element_size()
        _library().kv_write(
            states.data_ptr(),
            *(size * stride for stride in states.stride()[:2]),
            pool.data_ptr(),
            *(size * stride for stride in pool.stride()[:3]),
            slot_mapping.data_ptr(),
            num_tokens,
            num_heads,
            size * width,
        )


def address() -> int:
    """Return the address of the kernel, for other C++ to call."""
    return ctypes.cast(_library().kv_write, _ADDRESS).value or 0


@cache
def _library() -> ctypes.CDLL:
    library = load(SOURCE)
    library.kv_write.argtypes, library.kv_write.restype = _SIGNATURE, None
    return library
