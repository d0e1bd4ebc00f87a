"""Reference of `kv_keep` with indexing, which reads everything before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """R moves, each from some entries of a slot to consecutive entries of the same slot.

    Attributes:
        slot: (R,) int32, without duplicates.
        target: (R,) int32, first target entry of each move.
        source: (M,) int32, source entries of all moves in order.
        source_start: (R + 1,) int32, start of each move in `source`.
        max_sources: largest number of sources of a move, or an upper bound, on the host.
    """

    slot: Tensor
    target: Tensor
    source: Tensor
    source_start: Tensor
    max_sources: int


def kv_keep_ref(buffers: Sequence[Tensor], moves: Moves) -> None:
    """Compute `kv_keep`; synchronizes with the device."""
    lengths = moves.source_start.diff()
    slots = moves.slot.repeat_interleave(lengths).long()
    first = (moves.target - moves.source_start[:-1]).repeat_interleave(lengths)
    source = moves.source.long()
    target = first + torch.arange(len(source), device=source.device)
    for buffer in buffers:
        buffer[slots, :, target] = buffer[slots, :, source]
