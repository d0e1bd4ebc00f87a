"""Attention of a packed step by PyTorch's SDPA, for prompts and for steps that no kernel supports.

Rows of a batch are often equal, above all in their first forward pass: same number of keys and new
tokens, same tree. The overhead of small steps is the number of calls, so equal rows share one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from hf_spec_kernels import Scoring
from torch import Tensor
from torch.nn import functional as F

from hf_spec.engine.forward.attention_span import Segment, span

# Rows that share a call have their keys copied; for more keys the copy costs more than a call.
MAX_COPIED_KEYS = 64
# Queries of a prompt that share a mask.
BLOCK = 1024

# Slot and index expressions of a write, see `write_target`.
WriteTarget = tuple[int, slice] | tuple[Tensor, Tensor]


@dataclass(frozen=True)
class SegmentGroup:
    """Segments of equal shape, one per row.

    Attributes:
        first: one of them; it has the mask of all.
        slots: slots of the n rows.
        tokens: the packed tokens of all, segment by segment.
    """

    first: Segment
    slots: slice | Tensor
    tokens: slice | Tensor

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> SegmentGroup:
        """Group segments of equal shape."""
        slots = span([segment.slot for segment in segments])
        tokens = chain.from_iterable(range(segment.start, segment.end) for segment in segments)
        return cls(segments[0], slots, span(list(tokens)))


def group_segments(segments: Iterable[Segment]) -> list[SegmentGroup]:
    """Group the segments that may share a call."""
    groups: dict[object, list[Segment]] = {}
    for segment in segments:
        separate = segment.slot if segment.num_keys > MAX_COPIED_KEYS else None
        groups.setdefault((segment.shape_key, separate), []).append(segment)
    return [SegmentGroup.of(members) for members in groups.values()]


def write_target(slot_mapping: Tensor, device: torch.device) -> WriteTarget:
    """Return how to index a buffer on a device for a (2, T) slot mapping on the host.

    An integer and a slice if one row stores all tokens at consecutive indices, which `store` copies
    without a scatter; otherwise the (T,) slots and (T,) indices.
    """
    slots, indices = slot_mapping.tolist()
    entries = span(indices)
    if isinstance(entries, slice) and len(set(slots)) == 1:
        return slots[0], entries
    mapping = slot_mapping.to(device)
    return mapping[0], mapping[1]


def store(target: WriteTarget, states: Tensor, buffer: Tensor) -> None:
    """Write (1, H, T, D) new keys or values into the buffer of their layer."""
    slots, indices = target
    if isinstance(indices, slice):
        assert isinstance(slots, int), "a slice belongs to one slot"
        _part(_part(buffer, 0, slots, 1), 2, indices.start, states.shape[2]).copy_(states)
    else:
        assert isinstance(slots, Tensor), "indices come with a slot each"
        buffer[slots, :, indices] = states[0].transpose(0, 1).to(buffer.dtype)


def attend(
    groups: Sequence[SegmentGroup], query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Compute attention of (1, H, T, D) queries to a layer's buffers, as (1, T, H, Dv)."""
    if len(groups) == 1:
        return _attend_group(groups[0], query, keys, values, scoring)[None]
    out = query.new_empty(query.shape[2], query.shape[1], values.shape[-1])
    for group in groups:
        tokens = group.tokens
        out[tokens] = _attend_group(group, query[:, :, tokens], keys, values, scoring)
    return out[None]


def _attend_group(
    group: SegmentGroup, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attend for the (1, H, n * L, D) queries of a group of n rows, as (n * L, H, Dv)."""
    segment, (_, num_heads, total, width) = group.first, query.shape
    if segment.is_prompt:
        return _attend_prompt(group, query, keys, values, scoring)
    kv_heads, length = keys.shape[1], segment.num_tokens
    folded, num_rows = num_heads // kv_heads, total // length
    if num_rows > 1:
        query = query.view(num_heads, num_rows, length, width).transpose(0, 1)
    # Query heads of one key head become rows of it, so grouped queries need no copy of the keys.
    attended = _attend(
        query.reshape(num_rows, kv_heads, folded * length, width),
        _part(_of_slots(keys, group.slots), 2, 0, segment.num_keys),
        _part(_of_slots(values, group.slots), 2, 0, segment.num_keys),
        segment.mask(scoring.window, folded, query, scoring.chunk),
        scoring,
    )
    by_token = attended.view(num_rows, kv_heads, folded, length, -1).permute(0, 3, 1, 2, 4)
    # Contiguous, since models call `view` on the result. Under autocast the states of a layer may
    # have another dtype than its buffers.
    return by_token.reshape(total, num_heads, -1).to(query.dtype)


def _attend_prompt(
    group: SegmentGroup, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attend for the (1, H, L, D) queries of a prompt, as (L, H, Dv)."""
    segment, copies = group.first, query.shape[1] // keys.shape[1]
    # Few of SDPA's kernels take grouped queries; beside the scores of a prompt, a copy is small.
    keys, values = (
        _part(_of_slots(buffer, group.slots), 2, 0, segment.num_keys).repeat_interleave(copies, 1)
        for buffer in (keys, values)
    )
    limit = scoring.chunk or scoring.window
    is_limited = limit is not None and segment.last_position >= limit
    only_causal = segment.num_tokens == segment.num_keys and not is_limited
    if only_causal and scoring.softcap is None and scoring.sinks is None:
        attended = F.scaled_dot_product_attention(
            query, keys, values, is_causal=True, scale=scoring.scale
        )
    else:
        blocks = query.split(BLOCK, dim=2)
        firsts = range(segment.num_keys - segment.num_tokens, segment.num_keys, BLOCK)
        parts = (
            _attend_block(segment, first, block, keys, values, scoring)
            for first, block in zip(firsts, blocks, strict=True)
        )
        attended = torch.cat(list(parts), dim=2)
    # As in a draft tree, see above.
    return attended[0].transpose(0, 1).contiguous().to(query.dtype)


def _attend_block(
    segment: Segment, first: int, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attend with the queries of a chain from position `first` on, to the keys they may see."""
    begin, mask = segment.block_mask(first, scoring.window, query, scoring.chunk)
    keys, values = (_part(buffer, 2, begin, mask.shape[1]) for buffer in (keys, values))
    return _attend(query, keys, values, mask, scoring)


def _of_slots(buffer: Tensor, slots: slice | Tensor) -> Tensor:
    if isinstance(slots, Tensor):
        return buffer[slots]
    return _part(buffer, 0, slots.start, slots.stop - slots.start)


def _part(tensor: Tensor, axis: int, start: int, count: int) -> Tensor:
    """Narrow an axis, unless it has `count` entries: a view takes as long as a small operation."""
    return tensor if tensor.shape[axis] == count else tensor.narrow(axis, start, count)


def _attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attend with (n, H_kv, R, D) queries to (n, H_kv, S, D) keys.

    SDPA has no softcap and no sinks; those are computed step by step.
    """
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
        by_row = sinks.repeat_interleave(num_rows // sinks.shape[1], dim=1)
        scores = torch.cat([scores, by_row[..., None].expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(value.dtype)
    return weights[..., : key.shape[-2]] @ value
