"""Memory of weights in huge pages, on Linux.

A step of decoding reads every weight once. With pages of 4 KiB the processor spends a part of that
time, in a virtual machine up to a third, on looking up addresses; pages of 2 MiB avoid it. `empty`
allocates memory in them, and `move` moves memory that is in use (`MADV_COLLAPSE`, Linux 6.1), which
takes longer. Where the system has none, ordinary memory is used.
"""

from __future__ import annotations

import ctypes
import functools
import math
import mmap
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

HUGE_PAGE = 2 << 20
# Weights share mappings of this size, since few fill their last page.
MAPPING = 32 * HUGE_PAGE
ALIGNMENT = 64
MADV_COLLAPSE = 25


class _Mapping(mmap.mmap):
    """Memory for several tensors, unmapped with the last of them."""

    used = 0


_lock = threading.Lock()
# The mapping that later tensors share, if it is still in use.
_newest: list[weakref.ref[_Mapping]] = []


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor on the CPU, in huge pages if the system has them."""
    numel = math.prod(shape)
    nbytes = numel * dtype.itemsize
    if not nbytes or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(*shape, dtype=dtype)
    with _lock:
        mapping = _newest[-1]() if _newest else None
        if mapping is None or nbytes > len(mapping) - mapping.used:
            try:
                mapping = _mapped(nbytes)
            except (OSError, ValueError):
                return torch.empty(*shape, dtype=dtype)
        start = mapping.used
        mapping.used = start + nbytes + -nbytes % ALIGNMENT
    return torch.frombuffer(mapping, dtype=dtype, count=numel, offset=start).view(*shape)


def _mapped(nbytes: int) -> _Mapping:
    """Map memory for a tensor; large tensors have their own, others share it with later ones."""
    size = max(MAPPING, nbytes) + HUGE_PAGE
    mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # Old kernels do not align the address.
    mapping.used = -torch.frombuffer(mapping, dtype=torch.uint8, count=1).data_ptr() % HUGE_PAGE
    mapping.madvise(mmap.MADV_HUGEPAGE)
    if nbytes < MAPPING:
        _newest[:] = [weakref.ref(mapping)]
    return mapping


def move(tensors: Iterable[Tensor]) -> None:
    """Move the memory of tensors on the CPU to huge pages, as far as the system can.

    Addresses and contents stay the same.
    """
    collapse = _collapse()
    if collapse is not None:
        for first, end in page_runs((one.data_ptr(), one.nbytes) for one in tensors):
            pages = range(first, end, HUGE_PAGE)
            inner = pages[1:-1]
            # The pages at the ends fail if they belong to something else in part.
            alone = {pages[0], pages[-1]}
            if inner and collapse(inner.start, len(inner) * HUGE_PAGE):
                # Linux stops at the first page for which it finds no memory.
                alone.update(inner)
            for page in alone:
                collapse(page, HUGE_PAGE)


def page_runs(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the (first, end) addresses of runs of huge pages that (address, bytes) ranges touch.

    Pages that a weight fills in part count: the rest usually belongs to other weights.
    """
    runs: list[tuple[int, int]] = []
    for address, nbytes in sorted(ranges):
        first = address // HUGE_PAGE * HUGE_PAGE
        end = address + nbytes + -(address + nbytes) % HUGE_PAGE
        if runs and first <= runs[-1][1]:
            first, last = runs.pop()
            end = max(end, last)
        runs.append((first, end))
    return runs


@functools.cache
def _collapse() -> Callable[[int, int], int] | None:
    if sys.platform != "linux":
        return None
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return lambda address, nbytes: int(madvise(address, nbytes, MADV_COLLAPSE))
