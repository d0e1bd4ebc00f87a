"""Ragged tree attention in Triton.

One program takes a tile of rows, a row being a query of one head out of those that share a key
head, and a stretch of the slot's keys. With one stretch it writes the result. With several, for few
queries on a long context, it writes what it found of its stretch and the logarithm of its weight,
and a second kernel adds the stretches up (as in Flash-Decoding; Dao et al. 2023).

A key of another branch, or before the window, may hold Inf or NaN, and 0 * NaN is NaN. Values that
are not finite are therefore left out of the product, and whoever sees one gets NaN for it.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: C901, N803, PLR0912, PLR0913, PLR0915 - names and branches of compile time; one program

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.configs import config, num_processors
from hf_spec_kernels.dispatch import launches
from hf_spec_kernels.ragged_tree_attention.layout import LAYOUT_TENSORS, RaggedLayout, Scoring

OP = "ragged_tree_attention"
# Stretches per query at most, and programs per multiprocessor that more stretches should reach.
MAX_SPLITS = 64
PROGRAMS_PER_PROCESSOR = 2
# Most rows of the classes of tile sizes, see `config_key`.
FEW_ROWS, SOME_ROWS = 16, 1024


# A kernel is compiled again for whatever it is specialised on, so nothing that changes by step is.
@triton.jit(
    do_not_specialize=["num_tokens", "num_bytes", "tiles_per_segment"],
    do_not_specialize_on_alignment=[f"{name}_ptr" for name in LAYOUT_TENSORS],
)
def ragged_tree_attention_kernel(
    query_ptr, key_ptr, value_ptr, out_ptr, weight_ptr,
    slot_ptr, query_start_ptr, num_keys_ptr, prefix_ptr, bits_ptr,
    position_ptr, first_position_ptr, key_position_ptr, key_start_ptr, slopes_ptr, sinks_ptr,
    stride_query_t, stride_query_h, stride_key_s, stride_key_h, stride_key_c,
    stride_value_s, stride_value_h, stride_value_c,
    num_tokens, num_bytes, tiles_per_segment, scale, softcap, window,
    GROUPS: tl.constexpr, HEAD: tl.constexpr, VALUE_HEAD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_WINDOW: tl.constexpr, IS_CHUNK: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Out: (T, H, VALUE_HEAD), or with SPLIT (splits, T, H, VALUE_HEAD) float32 and weights."""
    pid = tl.program_id(0)
    kv_head = tl.program_id(1)
    pid_split = tl.program_id(2)
    segment = pid // tiles_per_segment
    first = tl.load(query_start_ptr + segment)
    num_rows = (tl.load(query_start_ptr + segment + 1) - first) * GROUPS
    offs_m = (pid % tiles_per_segment) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask_m = offs_m < num_rows
    # The grid is made for the longest segment.
    if (pid % tiles_per_segment) * BLOCK_M >= num_rows:
        return
    token = (first + offs_m // GROUPS).to(tl.int64)
    head = kv_head * GROUPS + offs_m % GROUPS
    num_heads = tl.num_programs(1) * GROUPS
    offs_d = tl.arange(0, BLOCK_D)
    query = tl.load(
        query_ptr + (token * stride_query_t + head * stride_query_h)[:, None] + offs_d[None, :],
        mask=mask_m[:, None] & (offs_d[None, :] < HEAD),
        other=0.0,
    )
    slot = tl.load(slot_ptr + segment).to(tl.int64)
    key_ptr += slot * stride_key_s + kv_head.to(tl.int64) * stride_key_h
    value_ptr += slot * stride_value_s + kv_head.to(tl.int64) * stride_value_h
    prefix = tl.load(prefix_ptr + segment)
    position = tl.load(position_ptr + token, mask=mask_m, other=2147483647)
    first_position = tl.load(first_position_ptr + segment)
    key_position_ptr += tl.load(key_start_ptr + segment)
    slope = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes_ptr + head)
    # How many positions a row sees, itself included; a chunk is a window that begins with it.
    reach = tl.zeros([BLOCK_M], tl.int32) + window
    if IS_CHUNK:
        reach = position % window + 1
    # Every segment is split by its own length, which the host need not know exactly.
    num_keys = tl.load(num_keys_ptr + segment)
    oldest = 0
    if HAS_WINDOW:
        # Places before the window of every row of the tile are not read, and not shared out.
        oldest = tl.maximum(tl.min(position - reach + 1, axis=0) - first_position, 0)
        oldest = oldest // BLOCK_N * BLOCK_N
    keys_per_split = tl.cdiv(tl.cdiv(num_keys - oldest, tl.num_programs(2)), BLOCK_N) * BLOCK_N
    begin = oldest + pid_split * keys_per_split
    end = tl.minimum(begin + keys_per_split, num_keys)
    # Whole blocks that everybody sees need no bits.
    middle = tl.maximum(tl.minimum(prefix // BLOCK_N * BLOCK_N, end), begin)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    row_bits = bits_ptr + token * num_bytes
    offs_v = tl.arange(0, BLOCK_V)
    # First the blocks without bits, then those whose bits mark the visible positions.
    for tail in tl.static_range(2):
        stop = end if tail else middle
        for start in range(middle if tail else begin, stop, BLOCK_N):
            entry = start + tl.arange(0, BLOCK_N)
            mask_n = entry < stop
            key = tl.load(
                key_ptr + entry[:, None].to(tl.int64) * stride_key_c + offs_d[None, :],
                mask=mask_n[:, None] & (offs_d[None, :] < HEAD),
                other=0.0,
            )
            # Products of float32 stay float32: TF32 would change what a model says.
            scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                # tanh by an exponential that cannot overflow.
                shrunk = tl.exp(-2.0 * tl.abs(scores) / softcap)
                capped = softcap * (1.0 - shrunk) / (1.0 + shrunk)
                scores = tl.where(scores < 0, -capped, capped)
            visible = mask_n[None, :]
            if tail:
                # Whole bytes of a row, from two neighbors each: a load per key would take most of
                # the registers.
                bit = start - prefix
                byte = (bit >> 3) + tl.arange(0, BLOCK_N // 8)
                byte_ptr = row_bits[:, None] + byte[None, :]
                low = tl.load(
                    byte_ptr,
                    mask=mask_m[:, None] & ((byte >= 0) & (byte < num_bytes))[None, :],
                    other=0,
                )
                high = tl.load(
                    byte_ptr + 1,
                    mask=mask_m[:, None] & ((byte >= -1) & (byte + 1 < num_bytes))[None, :],
                    other=0,
                )
                joined = (low.to(tl.int32) | (high.to(tl.int32) << 8)) >> (bit & 7)
                seen = ((joined[:, :, None] >> tl.arange(0, 8)[None, None, :]) & 1) != 0
                seen = tl.reshape(seen, [BLOCK_M, BLOCK_N])
                visible = visible & (seen | (entry < prefix)[None, :])
            if HAS_WINDOW or HAS_SLOPES:
                key_position = first_position + entry
                if tail:
                    after = entry >= prefix
                    listed = tl.load(
                        key_position_ptr + entry - prefix, mask=mask_n & after, other=0
                    )
                    key_position = tl.where(after, listed, key_position)
                distance = position[:, None] - key_position[None, :]
                if HAS_SLOPES:
                    scores -= slope[:, None] * distance.to(tl.float32)
                if HAS_WINDOW:
                    visible = visible & (distance < reach[:, None])
            scores = tl.where(visible, scores, float("-inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # A row that has seen nothing yet has no finite maximum to subtract.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, axis=1)
            value = tl.load(
                value_ptr + entry[:, None].to(tl.int64) * stride_value_c + offs_v[None, :],
                mask=mask_n[:, None] & (offs_v[None, :] < VALUE_HEAD),
                other=0.0,
            )
            if tail or HAS_WINDOW:
                finite = tl.abs(value.to(tl.float32)) < float("inf")
                broken = tl.max(tl.where(finite, 0, 1), axis=1)[None, :] != 0
                value = tl.where(finite, value, 0.0).to(value.dtype)
                worst = tl.max(tl.where(visible & broken, 1, 0), axis=1)
                total = tl.where(worst != 0, float("nan"), total)
            acc = acc * shrink[:, None]
            acc += tl.dot(weights.to(value.dtype), value, input_precision="ieee")
            top = new_top
    largest = top
    if HAS_SINKS and not SPLIT:
        sink = tl.load(sinks_ptr + head).to(tl.float32)
        largest = tl.maximum(top, sink)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    if HAS_SINKS and not SPLIT:
        shrink = tl.exp(top - base)
        acc *= shrink[:, None]
        total = total * shrink + tl.exp(sink - base)
    divisor = tl.where(total == 0.0, 1.0, total)
    out = acc / divisor[:, None]
    row = pid_split.to(tl.int64) * num_tokens * num_heads + token * num_heads + head
    if SPLIT:
        weight = tl.where(total == 0.0, float("-inf"), base + tl.log(divisor))
        tl.store(weight_ptr + row, weight, mask=mask_m)
    tl.store(
        out_ptr + row[:, None] * VALUE_HEAD + offs_v[None, :],
        out.to(out_ptr.dtype.element_ty),
        mask=mask_m[:, None] & (offs_v[None, :] < VALUE_HEAD),
    )


@triton.jit(do_not_specialize=["num_rows", "num_splits"])
def add_splits_kernel(
    partial_ptr, weight_ptr, sinks_ptr, out_ptr, num_rows, num_heads, num_splits,
    VALUE_HEAD: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_V: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Partial (splits, T * H, VALUE_HEAD), weights (splits, T * H) -> out (T * H, VALUE_HEAD)."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, BLOCK_S)
    offset = split.to(tl.int64) * num_rows + row
    weight = tl.load(weight_ptr + offset, mask=split < num_splits, other=float("-inf"))
    top = tl.max(weight, axis=0)
    if HAS_SINKS:
        sink = tl.load(sinks_ptr + row % num_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    base = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(weight - base)
    total = tl.sum(share, axis=0)
    if HAS_SINKS:
        total += tl.exp(sink - base)
    offs_v = tl.arange(0, BLOCK_V)
    mask_v = offs_v < VALUE_HEAD
    partial = tl.load(
        partial_ptr + offset[:, None] * VALUE_HEAD + offs_v[None, :],
        mask=(weight > float("-inf"))[:, None] & mask_v[None, :],
        other=0.0,
    )
    out = tl.sum(partial * share[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + row * VALUE_HEAD + offs_v, out.to(out_ptr.dtype.element_ty), mask=mask_v)


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
    min_split = chosen.pop("min_split")
    tiles = triton.cdiv(num_rows, chosen["BLOCK_M"])
    if num_splits is None:
        # A window shows a tile its own width, and the nodes before its last one.
        reach = scoring.window or scoring.chunk or layout.max_keys
        longest = min(layout.max_keys, reach + layout.max_queries)
        programs = num_segments * tiles * kv_heads
        processors = num_processors(query.device)
        num_splits = stretches(longest, chosen["BLOCK_N"], min_split, programs, processors)
    split = num_splits > 1
    partial, weight = out, out
    if split:
        partial = out.new_empty(num_splits, *out.shape, dtype=torch.float32)
        weight = out.new_empty(num_splits, num_tokens, num_heads, dtype=torch.float32)
    sinks = out if scoring.sinks is None else scoring.sinks
    launches[OP] += 1
    ragged_tree_attention_kernel[(num_segments * tiles, kv_heads, num_splits)](
        query, keys, values, partial, weight,
        *(getattr(layout, name) for name in LAYOUT_TENSORS),
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


def stretches(num_keys: int, block: int, min_split: int, programs: int, processors: int) -> int:
    """Return how many stretches the keys of a query are cut into.

    Args:
        num_keys: most keys of a segment.
        block: fewest keys of a stretch.
        min_split: fewest keys that are worth a stretch where every multiprocessor has a program.
        programs: programs per stretch.
        processors: multiprocessors of the device.
    """
    most = PROGRAMS_PER_PROCESSOR * processors // programs
    useful = triton.cdiv(num_keys, min_split)
    needed = min(processors // programs, triton.cdiv(num_keys, block))
    return max(1, min(most, max(useful, needed), MAX_SPLITS))


def config_key(query: Tensor, block_d: int, num_rows: int) -> str:
    """Key of the tile sizes: padded head size, bits of an element, number of rows.

    A row is a query of one head. `few` are those of a tile, `some` those of a draft, and `many`
    those of a prompt.
    """
    rows = "few" if num_rows <= FEW_ROWS else "some" if num_rows <= SOME_ROWS else "many"
    return f"head{max(64, block_d)}_{8 * query.element_size()}bit_{rows}"
