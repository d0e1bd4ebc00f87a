"""Moving rows together with indexing, which reads everything before it writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from hf_spec_kernels.kv_keep import Moves


def kv_keep_ref(buffers: Sequence[Tensor], moves: Moves) -> None:
    """See `kv_keep`; waits for the device."""
    starts, targets = moves.source_start.tolist(), moves.target.tolist()
    for move, slot in enumerate(moves.slot.tolist()):
        source = moves.source[starts[move] : starts[move + 1]].long()
        target = targets[move]
        for buffer in buffers:
            buffer[slot, :, target : target + len(source)] = buffer[slot, :, source]
