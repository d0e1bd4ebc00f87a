"""Moving rows together with indexing, which reads everything before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moves:
    """R moves, each of some places of one slot to consecutive places of the same slot.

    Attributes:
        slot: (R,) int32; no slot twice.
        target: (R,) int32, where the first of them goes.
        source: (M,) int32, the places to copy, move by move.
        source_start: (R + 1,) int32, where each move begins among them.
        max_sources: most of any move, on the host; a bound is fine.
    """

    slot: Tensor
    target: Tensor
    source: Tensor
    source_start: Tensor
    max_sources: int


def kv_keep_ref(buffers: Sequence[Tensor], moves: Moves) -> None:
    """See `kv_keep`; waits for the device."""
    lengths = moves.source_start.diff()
    slots = moves.slot.repeat_interleave(lengths).long()
    first = (moves.target - moves.source_start[:-1]).repeat_interleave(lengths)
    source = moves.source.long()
    target = first + torch.arange(len(source), device=source.device)
    for buffer in buffers:
        buffer[slots, :, target] = buffer[slots, :, source]
