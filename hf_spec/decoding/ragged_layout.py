"""A packed step as the kernels read it: flat tensors on the device of a layer, made once a step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from hf_spec_kernels.ragged_tree_attention import RaggedLayout, pack_bits
from torch import Tensor

if TYPE_CHECKING:
    from hf_spec.decoding.attention import Segment


def ragged_layout(segments: Sequence[Segment], device: torch.device) -> RaggedLayout:
    """Put what the segments see into one layout.

    Args:
        segments: one behind the other from token 0 on.
        device: of the queries.
    """
    # Where everything is visible nothing needs a bit.
    prefixes = [s.num_keys if s.visible is None else s.prefix for s in segments]
    key_ends = list(accumulate(s.num_keys for s in segments))
    columns = (
        [s.slot for s in segments],
        [s.num_keys for s in segments],
        prefixes,
        [0, *key_ends[:-1]],
        [0, *(s.end for s in segments)],
    )
    # One transfer for all of them.
    packed = torch.tensor([n for column in columns for n in column], dtype=torch.int32).to(device)
    slot, num_keys, prefix, key_start, query_start = packed.split([len(c) for c in columns])
    width = max(s.num_keys - first for s, first in zip(segments, prefixes, strict=True))
    visible = torch.zeros(segments[-1].end, width, dtype=torch.bool, device=device)
    for s, first in zip(segments, prefixes, strict=True):
        if s.visible is not None:
            visible[s.start : s.end, : s.num_keys - first] = s.visible[:, first:]
    return RaggedLayout(
        slot=slot,
        query_start=query_start,
        num_keys=num_keys,
        prefix=prefix,
        bits=pack_bits(visible),
        position=_joined([s.position for s in segments], device),
        key_position=_joined([s.key_position for s in segments], device),
        key_start=key_start,
        max_queries=max(s.end - s.start for s in segments),
        max_keys=max(s.num_keys for s in segments),
    )


def write_places(
    writes: Sequence[tuple[int, int, int, slice | Tensor]], num_tokens: int, device: torch.device
) -> Tensor:
    """(2, T) int32, the slot and the place where each packed token is stored.

    Args:
        writes: see `PackedStep`.
        num_tokens: T; a token that no write names has slot -1.
        device: of the keys and values.
    """
    places = torch.full((2, num_tokens), -1, dtype=torch.int32)
    for slot, start, end, where in writes:
        places[0, start:end] = slot
        index = torch.arange(where.start, where.stop) if isinstance(where, slice) else where
        places[1, start:end] = index
    return places.to(device)


def _joined(parts: Sequence[Tensor], device: torch.device) -> Tensor:
    return torch.cat([part.to(device) for part in parts]).int()
