"""Caller of the C++ kernel."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from hf_spec_kernels.build import load
from hf_spec_kernels.dispatch import CPU_DTYPES, launches
from hf_spec_kernels.ragged_tree_attention.layout import Addresses, RaggedLayout, Scoring

SOURCE = Path(__file__).with_name("kernel.cpp")
_ADDRESS, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_SIGNATURE = [
    *(_ADDRESS, _INT, _INT),  # queries
    *(_ADDRESS, _INT, _INT, _INT) * 2,  # keys, values
    _ADDRESS,  # result
    ctypes.POINTER(Addresses),
    *(_ADDRESS, _ADDRESS, _FLOAT, _FLOAT, _INT, _INT),  # scoring
    *(_INT, _INT, _INT, _INT),  # sizes
    ctypes.c_int,  # threads
]


def ragged_tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, layout: RaggedLayout, scoring: Scoring
) -> Tensor:
    """Run the kernel; see the package's function."""
    layout.check_states(query, keys, values)
    scoring.check(query)
    num_tokens, num_heads, head_size = query.shape
    out = query.new_empty(num_tokens, num_heads, values.shape[3])
    launches["ragged_tree_attention"] += 1
    _function(query.dtype)(
        query.data_ptr(),
        *query.stride()[:2],
        keys.data_ptr(),
        *keys.stride()[:3],
        values.data_ptr(),
        *values.stride()[:3],
        out.data_ptr(),
        layout.addresses,
        None if scoring.slopes is None else scoring.slopes.data_ptr(),
        None if scoring.sinks is None else scoring.sinks.data_ptr(),
        head_size**-0.5 if scoring.scale is None else scoring.scale,
        scoring.softcap or 0.0,
        scoring.window or 0,
        scoring.chunk or 0,
        num_heads,
        keys.shape[1],
        head_size,
        values.shape[3],
        torch.get_num_threads(),
    )
    return out


def address(dtype: torch.dtype) -> int:
    """Return the address of the kernel, for other C++ to call."""
    return ctypes.cast(_function(dtype), _ADDRESS).value or 0


@cache
def _function(dtype: torch.dtype) -> ctypes._NamedFuncPointer:
    function = getattr(load(SOURCE), f"attend_{CPU_DTYPES[dtype]}")
    function.argtypes, function.restype = _SIGNATURE, None
    return function
