"""Launching ragged tree attention: tile sizes, stretches of keys, and the memory between them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from hf_spec_kernels.configs import config, num_processors
from hf_spec_kernels.dispatch import launches
from hf_spec_kernels.ragged_tree_attention.kernel import (
    add_splits_kernel,
    ragged_tree_attention_kernel,
)
from hf_spec_kernels.ragged_tree_attention.layout import RaggedLayout, Scoring

OP = "ragged_tree_attention"
# Stretches per query at most, and programs per multiprocessor that more stretches should reach.
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2


def ragged_tree_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    layout: RaggedLayout,
    scoring: Scoring,
    num_splits: int | None = None,
) -> Tensor:
    """Launch the kernels; see the package's function.

    The keys of a segment are cut into `num_splits` stretches, by size and device if None.
    """
    layout.check(query, keys, values)
    scoring.check(query)
    num_tokens, num_heads, head_size = query.shape
    kv_heads, value_size = keys.shape[1], values.shape[-1]
    num_segments, groups = layout.slot.shape[0], num_heads // kv_heads
    out = query.new_empty(num_tokens, num_heads, value_size)
    if not out.numel():
        return out
    block_d = max(16, triton.next_power_of_2(head_size))
    block_v = max(16, triton.next_power_of_2(value_size))
    num_rows = layout.max_queries * groups
    chosen = dict(config(OP, config_key(query, block_d, num_rows), query.device))
    # Fewest keys that are worth a stretch.
    min_split = chosen.pop("min_split")
    tiles = triton.cdiv(num_rows, chosen["BLOCK_M"])
    if num_splits is None:
        wanted = PROGRAMS_PER_PROCESSOR * num_processors(query.device)
        useful = min(triton.cdiv(layout.max_keys, min_split), MAX_SPLITS)
        num_splits = max(1, min(wanted // (num_segments * tiles * kv_heads), useful))
    split = num_splits > 1
    partial, weight = out, out
    if split:
        partial = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
        weight = out.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    sinks = out if scoring.sinks is None else scoring.sinks
    launches[OP] += 1
    ragged_tree_attention_kernel[(num_segments * tiles, kv_heads, num_splits)](
        query, keys, values, partial, weight,
        layout.slot, layout.query_start, layout.num_keys, layout.prefix, layout.bits,
        layout.position, layout.first_position, layout.key_position, layout.key_start,
        out if scoring.slopes is None else scoring.slopes, sinks,
        *query.stride()[:2], *keys.stride()[:3], *values.stride()[:3],
        num_tokens, layout.bits.shape[1], tiles,
        float(head_size**-0.5 if scoring.scale is None else scoring.scale),
        float(scoring.softcap or 1.0), scoring.window or scoring.chunk or 1,
        GROUPS=groups, HEAD=head_size, VALUE_HEAD=value_size, BLOCK_D=block_d, BLOCK_V=block_v,
        HAS_WINDOW=(scoring.window or scoring.chunk) is not None,
        IS_CHUNK=scoring.chunk is not None, HAS_SOFTCAP=scoring.softcap is not None,
        HAS_SLOPES=scoring.slopes is not None, HAS_SINKS=scoring.sinks is not None,
        SPLIT=split, **chosen,
    )  # fmt: skip
    if split:
        add_splits_kernel[(num_tokens * num_heads,)](
            partial, weight, sinks, out, num_tokens * num_heads, num_heads, num_splits,
            VALUE_HEAD=value_size, BLOCK_S=16 if num_splits <= 16 else MAX_SPLITS, BLOCK_V=block_v,
            HAS_SINKS=scoring.sinks is not None,
        )  # fmt: skip
    return out


def config_key(query: Tensor, block_d: int, num_rows: int) -> str:
    """Key of the tile sizes: padded head size, bits of an element, few or many rows."""
    rows = "few" if num_rows <= 16 else "many"
    return f"head{max(64, block_d)}_{8 * query.element_size()}bit_{rows}"
