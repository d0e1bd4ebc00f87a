"""Visible entries of the packed queries of a ragged batch, as flat tensors."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_spec_kernels.dispatch import DTYPES, check_tensor

MAX_HEAD_SIZE = 512
# In the order in which kernels take them.
LAYOUT_TENSORS = (
    *("slot", "query_start", "num_keys", "prefix", "bits"),
    *("position", "first_position", "key_position", "key_start"),
)


class Addresses(ctypes.Structure):
    """Addresses of a layout's tensors and their sizes, for the C++ kernel."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in LAYOUT_TENSORS),
        ("num_segments", ctypes.c_int64),
        ("num_bytes", ctypes.c_int64),
    )


@dataclass(frozen=True)
class RaggedLayout:
    """G segments of consecutive queries, each on one slot.

    Every query of a segment sees the slot's first `prefix` entries, and those from `prefix` to
    `num_keys` whose bit is set. A segment may have no queries and no keys.

    Attributes:
        slot: (G,) int32.
        query_start: (G + 1,) int32, start of each segment among the T queries, all of which are
            covered.
        num_keys: (G,) int32, used entries of the slot.
        prefix: (G,) int32, at most `num_keys`.
        bits: (T, W) uint8; bit j % 8 of byte j // 8 is entry `prefix + j`. W may be 0.
        position: (T,) int32, position of each query.
        first_position: (G,) int32, position of entry 0; positions of a prefix are consecutive. Read
            for windows and ALiBi only, like the next two.
        key_position: flat int32, positions of the entries after each segment's prefix; a position
            is at most as far from the first one as its index is from 0.
        key_start: (G,) int32, start of each segment in `key_position`.
        max_queries, max_keys: most of a segment, or upper bounds, on the host.
    """

    slot: Tensor
    query_start: Tensor
    num_keys: Tensor
    prefix: Tensor
    bits: Tensor
    position: Tensor
    first_position: Tensor
    key_position: Tensor
    key_start: Tensor
    max_queries: int
    max_keys: int

    def check(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Raise `TypeError` or `ValueError` for arguments that the kernels do not support."""
        self.check_states(query, keys, values)
        self.check_tensors(query.device)

    def check_states(self, query: Tensor, keys: Tensor, values: Tensor) -> None:
        """Check queries, keys and values."""
        device, dtype = query.device, query.dtype
        check_tensor("query", query, (None, None, None), DTYPES, device)
        check_tensor("layout.position", self.position, (query.shape[0],), torch.int32, device)
        check_tensor("keys", keys, (None, None, None, query.shape[2]), dtype, device)
        check_tensor("values", values, (*keys.shape[:3], None), dtype, device)
        num_heads = query.shape[1]
        if keys.shape[1] == 0 or num_heads % keys.shape[1]:
            raise ValueError(f"{num_heads} query heads cannot share {keys.shape[1]} key heads")
        if max(query.shape[2], values.shape[3]) > MAX_HEAD_SIZE:
            raise ValueError(
                f"head sizes {query.shape[2]} and {values.shape[3]}: the kernel takes up to "
                f"{MAX_HEAD_SIZE}; use impl='torch'"
            )

    def check_tensors(self, device: torch.device) -> None:
        """Check the tensors of the layout."""
        size, num_tokens = self.slot.shape[0], self.position.shape[0]
        others = {"query_start": size + 1, "position": num_tokens, "key_position": None}
        for name in ("slot", "num_keys", "prefix", "first_position", "key_start", *others):
            shape = (others.get(name, size),)
            check_tensor(f"layout.{name}", getattr(self, name), shape, torch.int32, device)
        check_tensor("layout.bits", self.bits, (num_tokens, None), torch.uint8, device)
        if not self.bits.is_contiguous():
            raise ValueError("layout.bits must be contiguous: call .contiguous() on it")

    @cached_property
    def addresses(self) -> Addresses:
        """C++ structure, checked once for all layers that read the layout."""
        self.check_tensors(torch.device("cpu"))
        pointers = (getattr(self, name).data_ptr() for name in LAYOUT_TENSORS)
        return Addresses(*pointers, self.slot.shape[0], self.bits.shape[1])


@dataclass(frozen=True)
class Scoring:
    """Scores of queries and keys.

    score = softcap * tanh(scale * q.k / softcap) + slope * (key position - query position)

    Attributes:
        scale: 1 / sqrt(D) by default.
        window: number of positions that a query sees, itself included; None for all.
        softcap: None for none.
        slopes: (H,) float32 of ALiBi (Press et al. 2021, arXiv 2108.12409), or None.
        sinks: (H,) float32, logits per head that receive probability but have no value, or None.
        chunk: a query sees positions from the last multiple of this on; None for all. Excludes
            `window`.
    """

    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    slopes: Tensor | None = None
    sinks: Tensor | None = None
    chunk: int | None = None

    def check(self, query: Tensor) -> None:
        """Raise `TypeError` or `ValueError` for settings that do not fit (T, H, D) queries."""
        for name, per_head in (("slopes", self.slopes), ("sinks", self.sinks)):
            if per_head is not None:
                shape = (query.shape[1],)
                check_tensor(f"scoring.{name}", per_head, shape, torch.float32, query.device)
        for name, limit in (("window", self.window), ("chunk", self.chunk)):
            if limit is not None and limit < 1:
                raise ValueError(f"scoring.{name}={limit}; a query sees itself, so at least 1")
        if self.window is not None and self.chunk is not None:
            raise ValueError(f"scoring.window={self.window} beside chunk={self.chunk}; give one")
        if self.softcap is not None and self.softcap <= 0:
            raise ValueError(f"scoring.softcap={self.softcap} must be positive, or None for none")


def pack_bits(visible: Tensor) -> Tensor:
    """Pack (T, n) bool into (T, ceil(n / 8)) uint8, the first column in the lowest bit."""
    if visible.device.type == "cpu":
        # NumPy needs a single call.
        return torch.from_numpy(np.packbits(visible.numpy(), axis=1, bitorder="little"))
    num_bytes = -(-visible.shape[1] // 8)
    padded = F.pad(visible.to(torch.uint8), (0, 8 * num_bytes - visible.shape[1]))
    shifts = torch.arange(8, dtype=torch.uint8, device=visible.device)
    grouped = padded.view(visible.shape[0], num_bytes, 8) << shifts
    return grouped.sum(dim=-1, dtype=torch.uint8)
