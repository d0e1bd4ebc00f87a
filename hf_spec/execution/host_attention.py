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

from hf_spec.execution.row_work import span
from hf_spec.execution.segment import Segment

# To be together, rows have their keys copied; of more than these it costs more than a call saves.
MAX_COPIED_KEYS = 64


@dataclass(frozen=True)
class Alike:
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
    def of(cls, segments: Sequence[Segment]) -> Alike:
        """Put segments of equal view together."""
        slots = span([segment.slot for segment in segments])
        tokens = chain.from_iterable(range(segment.start, segment.end) for segment in segments)
        return cls(segments[0], slots, span(list(tokens)))


def together(segments: Iterable[Segment]) -> list[Alike]:
    """Segments that may share a call, each in one of the groups."""
    views: dict[object, list[Segment]] = {}
    for segment in segments:
        alone = segment.slot if segment.num_keys > MAX_COPIED_KEYS else None
        views.setdefault((segment.view, alone), []).append(segment)
    return [Alike.of(alike) for alike in views.values()]


def store(
    writes: Sequence[tuple[int, int, int, slice | Tensor]],
    where: Tensor,
    states: Tensor,
    buffer: Tensor,
) -> None:
    """Write (1, H, T, D) new keys or values into the buffer of their layer.

    `where` says the same as `writes`: (2, T) slots and places.
    """
    if len(writes) == 1:
        [(slot, start, end, places)] = writes
        buffer[slot, :, places] = states[0, :, start:end]
    else:
        slots, places = where.to(buffer.device)
        buffer[slots, :, places] = states[0].transpose(0, 1).to(buffer.dtype)


def attend(
    groups: Sequence[Alike], query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attention of (1, H, T, D) queries to what they see of a layer's buffers, as (1, T, H, Dv)."""
    num_heads, kv_heads, width = query.shape[1], keys.shape[1], values.shape[-1]
    folded = num_heads // kv_heads
    found: list[Tensor] = []
    for alike in groups:
        view = alike.view
        length, seen = view.end - view.start, slice(view.num_keys)
        # Query heads of one key head become rows of it: no copy of the keys for grouped queries.
        rows = query[0, :, alike.tokens].reshape(kv_heads, folded, -1, length, query.shape[-1])
        attended = _attend(
            rows.permute(2, 0, 1, 3, 4).flatten(2, 3),
            keys[alike.slots, :, seen],
            values[alike.slots, :, seen],
            view.mask(scoring.window, folded, query, scoring.chunk),
            scoring,
        )
        by_head = attended.reshape(-1, num_heads, length, width)
        # Under autocast layers may hand over states of another dtype than their buffers have.
        found.append(by_head.transpose(1, 2).flatten(0, 1).to(query.dtype))
    if len(found) == 1:
        # Contiguous, since models call `view` on what attention returns.
        return found[0].contiguous()[None]
    out = query.new_empty(query.shape[2], num_heads, width)
    for alike, states in zip(groups, found, strict=True):
        out[alike.tokens] = states
    return out[None]


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
