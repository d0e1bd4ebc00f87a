"""`verify_tree` in Triton: one pass over the logits, then a walk per row.

The first kernel reduces the logits of each node to two numbers per chunk of the vocabulary: the
maximum with its index, or the maximum with the sum of weights. In the second kernel one program per
row walks the tree. At a node it selects the chunk of the token; sampling reads that chunk again.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0124, PLR0913 - upper-case names at compile time, x != x for NaN, pointers

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.configs import vocabulary_config
from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches

OP = "verify_tree"


@triton.jit
def _weights(logits, top):
    """Return exp(logits - top): 0 for NaN and -inf, 1 for the largest even if it is infinite."""
    weights = tl.where(logits == top, 1.0, tl.exp(logits - top))
    return tl.where(logits > float("-inf"), weights, 0.0)


@triton.jit
def _largest(logits, index, SENTINEL: tl.constexpr):
    """Return the largest value and its first index; NaN is larger than everything."""
    nan = tl.min(tl.where(logits != logits, index, SENTINEL), axis=0)
    top = tl.max(tl.where(logits != logits, float("-inf"), logits), axis=0)
    first = tl.min(tl.where(logits == top, index, SENTINEL), axis=0)
    found = nan < SENTINEL
    return tl.where(found, float("nan"), top), tl.where(found, nan, first)


@triton.jit
def chunk_kernel(
    logits_ptr, top_ptr, where_ptr, stride_logits, vocab_size,
    BLOCK_V: tl.constexpr, SENTINEL: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """Grid (N, chunks): maxima (N, chunks) float32 with their places int32, or sums float32."""
    node, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    index = chunk * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = index < vocab_size
    logits = tl.load(logits_ptr + node * stride_logits + index, mask=inside, other=float("-inf"))
    logits = logits.to(tl.float32)
    out = node * tl.num_programs(1) + chunk
    if DRAW:
        top = tl.max(tl.where(logits != logits, float("-inf"), logits), axis=0)
        tl.store(where_ptr + out, tl.sum(_weights(logits, top), axis=0))
        tl.store(top_ptr + out, top)
    else:
        # Indices outside the vocabulary come last, so ties never select them.
        top, where = _largest(logits, index, SENTINEL)
        tl.store(where_ptr + out, where)
        tl.store(top_ptr + out, top)


@triton.jit
def _first_beyond(weights, goal, index, SENTINEL: tl.constexpr):
    """First index whose cumulated weight exceeds `goal`, and the weight before it.

    Where rounding lets none exceed it, the last one of any weight.
    """
    total = tl.cumsum(weights, axis=0)
    beyond = (total > goal) & (weights > 0.0)
    first = tl.min(tl.where(beyond, index, SENTINEL), axis=0)
    last = tl.max(tl.where(weights > 0.0, index, -1), axis=0)
    found = tl.where(first < SENTINEL, first, last)
    return found, tl.sum(tl.where(index < found, weights, 0.0), axis=0)


@triton.jit(do_not_specialize=["max_accepted"])
def walk_kernel(
    logits_ptr, top_ptr, where_ptr, token_ptr, parent_ptr, row_start_ptr, uniforms_ptr,
    accepted_ptr, num_accepted_ptr, bonus_ptr,
    stride_logits, max_accepted, vocab_size, num_chunks,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    SENTINEL: tl.constexpr, DRAW: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    node = tl.load(row_start_ptr + row)
    end = tl.load(row_start_ptr + row + 1)
    step = tl.arange(0, BLOCK_N)
    offs_n = node + step
    tokens = tl.load(token_ptr + offs_n, mask=offs_n < end, other=-1)
    parents = tl.load(parent_ptr + offs_n, mask=offs_n < end, other=-1)
    path = tl.full([BLOCK_N], -1, tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    count = tl.full([], 0, tl.int64)
    bonus = tl.full([], -1, tl.int64)
    walking = node < end
    while walking:
        stats = node * num_chunks + chunk
        inside = chunk < num_chunks
        tops = tl.load(top_ptr + stats, mask=inside, other=float("-inf"))
        if DRAW:
            top = tl.max(tops, axis=0)
            sums = tl.load(where_ptr + stats, mask=inside, other=0.0) * _weights(tops, top)
            goal = tl.load(uniforms_ptr + node) * tl.sum(sums, axis=0)
            chosen, before = _first_beyond(sums, goal, chunk, SENTINEL)
            index = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
            logits = tl.load(
                logits_ptr + node * stride_logits + index,
                mask=(index >= 0) & (index < vocab_size),
                other=float("-inf"),
            ).to(tl.float32)
            token, _ = _first_beyond(_weights(logits, top), goal - before, index, SENTINEL)
        else:
            places = tl.load(where_ptr + stats, mask=inside, other=SENTINEL)
            _, best = _largest(tops, chunk, SENTINEL)
            token = tl.min(tl.where(chunk == best, places, SENTINEL), axis=0)
        bonus = token.to(tl.int64)
        match = (parents == node) & (tokens == bonus) & (bonus >= 0) & (offs_n < end)
        child = tl.min(tl.where(match, step, BLOCK_N), axis=0)
        walking = child < BLOCK_N
        if walking:
            node = tl.load(row_start_ptr + row) + child
            path = tl.where(step == count, node, path)
            count += 1
    tl.store(accepted_ptr + row * max_accepted + step, path, mask=step < max_accepted)
    tl.store(num_accepted_ptr + row, count)
    tl.store(bonus_ptr + row, bonus)


def verify_tree(
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch both kernels; see the package's function."""
    device = logits.device
    check_tensor("logits", logits, (None, None), DTYPES, device)
    num_nodes, vocab_size = logits.shape
    check_tensor("token_ids", token_ids, (num_nodes,), torch.int64, device)
    check_tensor("parent", parent, (num_nodes,), torch.int64, device)
    check_tensor("row_start", row_start, (None,), torch.int64, device)
    if uniforms is not None:
        check_tensor("uniforms", uniforms, (num_nodes,), torch.float32, device)
    if not vocab_size or not row_start.shape[0]:
        raise ValueError(f"logits {tuple(logits.shape)} of {row_start.shape[0] - 1} rows: no tree")
    num_rows, draw = row_start.shape[0] - 1, uniforms is not None
    accepted = row_start.new_empty(num_rows, max(max_nodes - 1, 0))
    num_accepted, bonus = row_start.new_empty(num_rows), row_start.new_empty(num_rows)
    if not num_rows:
        return accepted, num_accepted, bonus
    chosen = vocabulary_config(OP, logits)
    chunk_size = chosen["BLOCK_V"]
    num_chunks = triton.cdiv(vocab_size, chunk_size)
    top = logits.new_empty(num_nodes, num_chunks, dtype=torch.float32)
    where = logits.new_empty(top.shape, dtype=torch.float32 if draw else torch.int32)
    # Larger than every index, and still an int32.
    sentinel = 2**31 - 1
    if num_nodes:
        chunk_kernel[(num_nodes, num_chunks)](
            logits, top, where, logits.stride(0), vocab_size,
            SENTINEL=sentinel, DRAW=draw, **chosen,
        )  # fmt: skip
    launches[OP] += 1
    walk_kernel[(num_rows,)](
        logits, top, where, token_ids, parent, row_start, top if uniforms is None else uniforms,
        accepted, num_accepted, bonus,
        logits.stride(0), accepted.shape[1], vocab_size, num_chunks,
        BLOCK_V=chunk_size, BLOCK_C=triton.next_power_of_2(num_chunks),
        BLOCK_N=triton.next_power_of_2(max(max_nodes, 16)),
        SENTINEL=sentinel, DRAW=draw,
    )  # fmt: skip
    return accepted, num_accepted, bonus
