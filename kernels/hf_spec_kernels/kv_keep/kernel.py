"""`kv_keep` in Triton, with one launch for all buffers of the same shape, strides and dtype.

A program moves some elements of one head of one buffer. It loads the whole move and writes after a
barrier, so sources and targets may overlap.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0913 - compile-time names are upper-case, pointers are many

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches
from hf_spec_kernels.kv_keep.reference import Moves

OP = "kv_keep"
# Elements per program, and so the longest move.
TILE = 4096
# Bytes per load of a thread, for buffers with this alignment.
VECTOR = 16


@triton.jit(
    do_not_specialize_on_alignment=["slot_ptr", "target_ptr", "source_ptr", "source_start_ptr"]
)
def kv_keep_kernel(
    buffers_ptr, slot_ptr, target_ptr, source_ptr, source_start_ptr,
    stride_s, stride_h, stride_c, head_size,
    ELEMENT: tl.constexpr, VECTOR: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (moves * parts of a head, heads, buffers)."""
    parts = tl.cdiv(head_size, BLOCK_D)
    move = tl.program_id(0) // parts
    offs_d = (tl.program_id(0) % parts) * BLOCK_D + tl.arange(0, BLOCK_D)
    address = tl.load(buffers_ptr + tl.program_id(2))
    first = tl.load(source_start_ptr + move)
    step = tl.arange(0, BLOCK_P)
    mask_p = step < tl.load(source_start_ptr + move + 1) - first
    source = tl.load(source_ptr + first + step, mask=mask_p, other=0).to(tl.int64)
    target = tl.load(target_ptr + move).to(tl.int64) + step
    # The compiler cannot infer the alignment of an address that is loaded from memory.
    base = tl.multiple_of(address.to(tl.pointer_type(ELEMENT)), VECTOR)
    base += tl.load(slot_ptr + move).to(tl.int64) * stride_s
    base += tl.program_id(1).to(tl.int64) * stride_h
    mask = mask_p[:, None] & (offs_d < head_size)[None, :]
    held = tl.load(base + source[:, None] * stride_c + offs_d[None, :], mask=mask)
    tl.debug_barrier()
    tl.store(base + target[:, None] * stride_c + offs_d[None, :], held, mask=mask)


def kv_keep(buffers: Sequence[Tensor], moves: Moves) -> None:
    """Launch the kernel once per kind of buffer; see the package's function."""
    device = buffers[0].device
    num_moves = moves.slot.shape[0]
    sizes = {"slot": num_moves, "target": num_moves, "source": None, "source_start": num_moves + 1}
    for name, size in sizes.items():
        check_tensor(f"moves.{name}", getattr(moves, name), (size,), torch.int32, device)
    if not 0 <= moves.max_sources <= TILE:
        raise ValueError(f"a move of {moves.max_sources} entries; the kernel takes up to {TILE}")
    alike = defaultdict(list)
    for index, buffer in enumerate(buffers):
        check_tensor(f"buffers[{index}]", buffer, (None, None, None, None), DTYPES, device)
        alike[buffer.dtype, tuple(buffer.shape), buffer.stride()].append(buffer.data_ptr())
    if not (num_moves and moves.max_sources):
        return
    block_p = max(8, triton.next_power_of_2(moves.max_sources))
    for (dtype, shape, strides), addresses in alike.items():
        block_d = min(triton.next_power_of_2(shape[3]), max(1, TILE // block_p))
        grid = (num_moves * triton.cdiv(shape[3], block_d), shape[1], len(addresses))
        aligned = all(address % VECTOR == 0 for address in addresses)
        # Every thread has a load.
        threads = block_p * block_d * dtype.itemsize // VECTOR
        launches[OP] += 1
        kv_keep_kernel[grid](
            _table(tuple(addresses), device),
            *(moves.slot, moves.target, moves.source, moves.source_start),
            *strides[:3],
            shape[3],
            # Only bits are copied.
            ELEMENT=tl.int32 if dtype.itemsize == 4 else tl.int16,
            VECTOR=VECTOR if aligned else dtype.itemsize,
            BLOCK_P=block_p,
            BLOCK_D=block_d,
            num_warps=min(4, triton.next_power_of_2(max(1, threads // 32))),
        )


@lru_cache(maxsize=64)
def _table(addresses: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the addresses on the device; cached, since a pool keeps its buffers for many steps."""
    return torch.tensor(addresses, dtype=torch.int64, device=device)
