"""Ragged tree attention by its definition: a segment at a time, in float32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.ragged_tree_attention.layout import RaggedLayout, Scoring


def ragged_tree_attention_ref(
    query: Tensor, keys: Tensor, values: Tensor, layout: RaggedLayout, scoring: Scoring
) -> Tensor:
    """See `ragged_tree_attention`; waits for the device."""
    num_heads, groups = query.shape[1], query.shape[1] // keys.shape[1]
    out = query.new_empty(query.shape[0], num_heads, values.shape[-1])
    starts = layout.query_start.tolist()
    wide = torch.promote_types(query.dtype, torch.float32)
    for segment, slot in enumerate(layout.slot.tolist()):
        rows = slice(starts[segment], starts[segment + 1])
        num_keys = int(layout.num_keys[segment])
        key, value = (
            buffer[slot, :, :num_keys].to(wide).repeat_interleave(groups, dim=0)
            for buffer in (keys, values)
        )
        scores = _scores(query[rows].to(wide), key, layout, scoring, segment)
        if scoring.sinks is not None:
            sinks = scoring.sinks.to(wide)[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], dim=-1)
        seen = scores[..., :num_keys] != float("-inf")
        # A query that sees nothing would divide zero by zero.
        weights = scores.softmax(dim=-1)[..., :num_keys]
        weights = weights.masked_fill(~seen.any(dim=-1, keepdim=True), 0.0)
        # 0 * NaN is NaN: what a query does not see must not reach it.
        finite = value.isfinite()
        broken = ~finite.all(dim=-1, keepdim=True)
        mixed = weights @ value.where(finite, 0.0)
        mixed = mixed.masked_fill(seen.to(wide) @ broken.to(wide) > 0, float("nan"))
        out[rows] = mixed.transpose(0, 1).to(query.dtype)
    return out


def _scores(
    query: Tensor, key: Tensor, layout: RaggedLayout, scoring: Scoring, segment: int
) -> Tensor:
    """Return (H, Q, n) of (Q, H, D) queries on (H, n, D) keys, -inf where a key is not visible."""
    scale = query.shape[-1] ** -0.5 if scoring.scale is None else scoring.scale
    scores = query.transpose(0, 1) @ key.transpose(1, 2) * scale
    if scoring.softcap is not None:
        scores = torch.tanh(scores / scoring.softcap) * scoring.softcap
    num_keys, prefix = key.shape[1], int(layout.prefix[segment])
    rows = slice(int(layout.query_start[segment]), int(layout.query_start[segment + 1]))
    # Positions are consecutive in the prefix and listed after it.
    entry, start = torch.arange(num_keys, device=query.device), int(layout.key_start[segment])
    listed = layout.key_position[start : start + num_keys - prefix]
    positions = torch.cat([layout.first_position[segment] + entry[:prefix], listed])
    # Distance of each key before the query; negative for keys of other branches only.
    distance = layout.position[rows, None] - positions
    if scoring.slopes is not None:
        scores = scores - scoring.slopes.to(scores.dtype)[:, None, None] * distance
    tail = entry[: num_keys - prefix]
    bits = (layout.bits[rows][:, tail // 8] >> (tail % 8).to(torch.uint8)) & 1
    visible = torch.cat([bits.new_ones(bits.shape[0], prefix), bits], dim=1).bool()
    if scoring.window is not None:
        visible = visible & (distance < scoring.window)
    if scoring.chunk is not None:
        visible = visible & (distance <= layout.position[rows, None] % scoring.chunk)
    return scores.masked_fill(~visible, float("-inf"))
