"""A packed step as the kernels read it: flat tensors, built on the host and copied in one transfer.

`padded` extends a layout to a shape that many steps share, for steps that run as a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import accumulate, chain
from typing import Any, NamedTuple

import numpy as np
import torch
from hf_spec_kernels.ragged_tree_attention import RaggedLayout, pack_bits
from torch import Tensor
from torch.nn import functional as F

from hf_spec.engine.forward.attention_span import Segment

TENSORS = tuple(f.name for f in fields(RaggedLayout) if not f.name.startswith("max_"))


def ragged_layout(segments: Sequence[Segment], sees: Tensor | None = None) -> RaggedLayout:
    """Build the host layout of segments that follow each other from token 0 on.

    If `sees` is given, the device has the bits, and those of the layout are zeros.
    """
    # A segment that attends to all its keys needs no bits.
    prefixes = [s.num_keys if s.seen is None else s.prefix for s in segments]
    tails = [s.num_keys - first for s, first in zip(segments, prefixes, strict=True)]
    bits = (
        _bits(segments, max(tails)) if sees is None else torch.zeros(sees.shape, dtype=torch.uint8)
    )
    columns = (
        [s.slot for s in segments],
        [0, *(s.end for s in segments)],
        [s.num_keys for s in segments],
        prefixes,
        [s.first_position for s in segments],
        [0, *accumulate(tails)][:-1],
        [position for s in segments for position in s.position.tolist()],
        [p for s in segments if s.seen is not None for p in s.tail_position.tolist()],
    )
    # One tensor is split, since creating small tensors is slow.
    numbers = torch.tensor([*chain.from_iterable(columns)], dtype=torch.int32)
    parts = numbers.split([*map(len, columns)])
    slot, starts, num_keys, prefix, first, key_start, position, key_position = parts
    return RaggedLayout(
        slot=slot,
        query_start=starts,
        num_keys=num_keys,
        prefix=prefix,
        bits=bits,
        position=position,
        first_position=first,
        key_position=key_position,
        key_start=key_start,
        max_queries=max(s.num_tokens for s in segments),
        max_keys=max(s.num_keys for s in segments),
    )


def _bits(segments: Sequence[Segment], width: int) -> Tensor:
    seen = np.zeros((segments[-1].end, width), dtype=bool)
    for s in segments:
        if s.seen is not None:
            seen[s.start : s.end, : s.num_keys - s.prefix] = s.seen.numpy()
    return pack_bits(torch.from_numpy(seen))


def slot_mapping(runs: Iterable[tuple[int, Sequence[int]]]) -> Tensor:
    """Build the (2, T) int32 slot and index where each token is stored.

    `runs` are (slot, indices in it) of consecutive tokens; slot -1 stores nothing.
    """
    slots: list[int] = []
    indices: list[int] = []
    for slot, run in runs:
        slots += [slot] * len(run)
        indices += run
    return torch.tensor([slots, indices], dtype=torch.int32)


def segment_slot_mapping(segments: Sequence[Segment]) -> Tensor:
    """Build the slot mapping of segments; tokens that are not stored get slot and index -1."""
    return slot_mapping(
        (s.slot, s.cache_indices) if s.cache_indices else (-1, [-1] * s.num_tokens)
        for s in segments
    )


def tensors_of(layout: RaggedLayout) -> list[Tensor]:
    """Return the tensors of a layout, in the order of `TENSORS`."""
    return [getattr(layout, name) for name in TENSORS]


def with_tensors(layout: RaggedLayout, tensors: Sequence[Tensor]) -> RaggedLayout:
    """Return the layout with other tensors, given in the order of `TENSORS`."""
    changes: dict[str, Any] = dict(zip(TENSORS, tensors, strict=True))
    return replace(layout, **changes)


class Sizes(NamedTuple):
    """Sizes that a graph fixes: tokens, segments, bytes of bits, queries of a segment."""

    tokens: int
    segments: int
    num_bytes: int
    max_queries: int

    @classmethod
    def of(cls, layout: RaggedLayout, min_tokens: int = 1, min_segments: int = 1) -> Sizes:
        """Return the sizes to pad the layout to, shared by layouts of similar size."""
        tokens = round_up(max(layout.position.shape[0], min_tokens))
        segments = round_up(max(layout.slot.shape[0], min_segments))
        num_bytes = round_up(max(layout.bits.shape[1], 1))
        queries = round_up(_most_queries(layout, tokens))
        return cls(tokens, segments, num_bytes, queries)

    def hold(self, layout: RaggedLayout) -> bool:
        """Return True if the layout can be padded to these sizes."""
        enough = self.tokens >= layout.position.shape[0] and self.segments >= layout.slot.shape[0]
        enough = enough and self.num_bytes >= layout.bits.shape[1]
        return enough and self.max_queries >= _most_queries(layout, self.tokens)


def padded(layout: RaggedLayout, sizes: Sizes, capacity: int) -> RaggedLayout:
    """Return the same step with more tokens, segments and bits.

    Added tokens belong to the last segment and attend to its prefix only. Added segments are
    empty. No segment has more keys than `capacity`.
    """
    added = sizes.tokens - layout.position.shape[0]
    empty = sizes.segments - layout.slot.shape[0]
    starts = layout.query_start.clone()
    starts[-1] = sizes.tokens
    room = sizes.segments * 8 * sizes.num_bytes
    return RaggedLayout(
        slot=F.pad(layout.slot, (0, empty)),
        query_start=F.pad(starts, (0, empty), value=sizes.tokens),
        num_keys=F.pad(layout.num_keys, (0, empty)),
        prefix=F.pad(layout.prefix, (0, empty)),
        bits=F.pad(layout.bits, (0, sizes.num_bytes - layout.bits.shape[1], 0, added)),
        # The position of the last token, so that no window reaches further back for them.
        position=torch.cat([layout.position, layout.position[-1:].expand(added)]),
        first_position=F.pad(layout.first_position, (0, empty)),
        key_position=F.pad(layout.key_position, (0, room - layout.key_position.shape[0])),
        key_start=F.pad(layout.key_start, (0, empty)),
        max_queries=sizes.max_queries,
        max_keys=capacity,
    )


def write_padded(layout: RaggedLayout, arrays: Sequence[np.ndarray], tokens: int) -> None:
    """Write the tensors of `padded(layout, ...)`, in the order of `TENSORS`, to arrays."""
    for name, array in zip(TENSORS, arrays, strict=True):
        source = getattr(layout, name).numpy()
        count = len(source)
        if name == "bits":
            array.fill(0)
            array[:count, : source.shape[1]] = source
            continue
        array[:count] = source
        if name == "query_start":
            array[count - 1 :] = tokens
        else:
            array[count:] = source[-1] if name == "position" else 0


def _most_queries(layout: RaggedLayout, num_tokens: int) -> int:
    """Return the most queries of a segment once the last one is padded to `num_tokens`."""
    starts = layout.query_start
    return max(layout.max_queries, num_tokens - int(starts[-2]))


def round_up(number: int) -> int:
    """Round up to one of 1, 2, 3, 4, 6, 8, 12, 16, 24, ...: few sizes, at most 50% too large."""
    power = 1 << max(number - 1, 0).bit_length()
    return power * 3 // 4 if number <= power * 3 // 4 else power
