"""Moving rows together with indexing, which reads everything before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    starts, targets = moves.source_start.tolist(), moves.target.tolist()
    for move, slot in enumerate(moves.slot.tolist()):
        source = moves.source[starts[move] : starts[move + 1]].long()
        target = targets[move]
        for buffer in buffers:
            buffer[slot, :, target : target + len(source)] = buffer[slot, :, source]
