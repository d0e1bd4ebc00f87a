"""Attention of a packed step where no kernel serves it: one call for all rows of equal shape.

Rows of a batch are often alike, those of a first forward above all: as many keys, as many new
tokens, the same tree. Calls are what small steps cost, so such rows share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from hf_spec_kernels import Scoring
from torch import Tensor
from torch.nn import functional as F

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.row_batch import span

# To be together, rows have their keys copied; of more than these it costs more than a call saves.
MAX_COPIED_KEYS = 64


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of equal view.

    Attributes:
        view: the first of them.
        slots: of n rows.
        tokens: where the tokens of all are in the packed sequence, segment by segment.
    """

    view: Segment
    slots: slice | Tensor
    tokens: slice | Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> SegmentGroup:
        """Put segments of equal view together."""
        slots = span([segment.slot for segment in segments])
        tokens = chain.from_iterable(range(segment.start, segment.end) for segment in segments)
        return cls(segments[0], slots, span(list(tokens)))


def together(segments: Iterable[Segment]) -> list[SegmentGroup]:
    """Segments that may share a call, each in one of the groups."""
    views: dict[object, list[Segment]] = {}
    for segment in segments:
        alone = segment.slot if segment.num_keys > MAX_COPIED_KEYS else None
        views.setdefault((segment.view, alone), []).append(segment)
    return [SegmentGroup.of(alike) for alike in views.values()]


def store(
    writes: Sequence[tuple[int, int, int, slice | Tensor]],
    where: Tensor,
    states: Tensor,
    buffer: Tensor,
) -> None:
    """Write (1, H, T, D) new keys or values into the buffer of their layer.

    `where` says the same as `writes`: (2, T) slots and places.
    """
    if len(writes) > 1:
        slots, places = where.to(buffer.device)
        buffer[slots, :, places] = states[0].transpose(0, 1).to(buffer.dtype)
        return
    [(slot, start, end, places)] = writes
    if isinstance(places, slice):
        target = _part(_part(buffer, 0, slot, 1), 2, places.start, end - start)
        target.copy_(_part(states, 2, start, end - start))
    else:
        buffer[slot, :, places] = states[0, :, start:end]


def attend(
    groups: Sequence[SegmentGroup], query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attention of (1, H, T, D) queries to what they see of a layer's buffers, as (1, T, H, Dv)."""
    if len(groups) == 1:
        return _attend_alike(groups[0], query, keys, values, scoring)[None]
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    for alike in groups:
        tokens = alike.tokens
        out[tokens] = _attend_alike(alike, query[:, :, tokens], keys, values, scoring)
    return out[None]


def _attend_alike(
    alike: SegmentGroup, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Of the (1, H, n * L, D) queries of n rows, segment by segment, as (n * L, H, Dv)."""
    view, (_, num_heads, total, width) = alike.view, query.shape
    kv_heads, length = keys.shape[1], view.end - view.start
    folded, num_rows = num_heads // kv_heads, total // length
    if num_rows > 1:
        query = query.view(num_heads, num_rows, length, width).transpose(0, 1)
    # Query heads of one key head become rows of it: no copy of the keys for grouped queries.
    attended = _attend(
        query.reshape(num_rows, kv_heads, folded * length, width),
        _part(_of_slots(keys, alike.slots), 2, 0, view.num_keys),
        _part(_of_slots(values, alike.slots), 2, 0, view.num_keys),
        view.mask(scoring.window, folded, query, scoring.chunk),
        scoring,
    )
    by_token = attended.view(num_rows, kv_heads, folded, length, -1).permute(0, 3, 1, 2, 4)
    # Contiguous, since models call `view` on what attention returns. Under autocast layers may hand
    # over states of another dtype than their buffers have.
    return by_token.reshape(total, num_heads, -1).to(query.dtype)


def _of_slots(buffer: Tensor, slots: slice | Tensor) -> Tensor:
    if isinstance(slots, Tensor):
        return buffer[slots]
    return _part(buffer, 0, slots.start, slots.stop - slots.start)


def _part(tensor: Tensor, axis: int, start: int, count: int) -> Tensor:
    """Some of an axis; the fewer views, the better: each takes as long as a small operation."""
    return tensor if tensor.shape[axis] == count else tensor.narrow(axis, start, count)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attention of (n, H_kv, R, D) queries on (n, H_kv, S, D) keys; by hand where SDPA cannot."""
    softcap, sinks = scoring.softcap, scoring.sinks
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scoring.scale
        )
    scores = query @ key.transpose(-1, -2) * (scoring.scale or query.shape[-1] ** -0.5)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        kv_heads, num_rows = scores.shape[1:3]
        sinks = sinks.to(scores.dtype).view(kv_heads, -1)
        own = sinks.repeat_interleave(num_rows // sinks.shape[1], dim=1)
        scores = torch.cat([scores, own[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value
