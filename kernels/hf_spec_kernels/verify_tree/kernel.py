"""`verify_tree` in Triton: one pass over the logits, then a walk per row.

The first kernel reduces the logits of each node to two numbers per chunk of the vocabulary: the
maximum with its index, or the maximum with the sum of weights. In the second kernel one program per
row walks the tree. At a node it selects the chunk of the token; sampling reads that chunk again.
Every rejected child of a sampled draft costs one pass over the logits and draft probabilities of
its parent; the distributions after several rejections are recomputed from the masses of all.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0124, PLR0913, PLR0915 - names at compile time, x != x for NaN, pointers

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.configs import vocabulary_config
from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches

OP = "verify_tree"
# The least finite float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _weights(logits, top):
    """Return exp(logits - top), 0 for -inf even if `top` is; NaN where the softmax is undefined."""
    return tl.exp(logits - tl.maximum(top, LOWEST))


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
    """Grid (N, chunks): maxima (N, chunks) float32 with their indices int32, or sums float32."""
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


@triton.jit
def _after_rejections(
    logits_ptr, draft_ptr, index, vocab_size, top, total, rejected, masses, rests, num_rejected,
    BLOCK_N: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Return p and q at `index` after the rejections of a node's first children.

    `rejected`, `masses` and `rests` have their tokens, the sums of max(p - q, 0), and those of q
    without the token. Where a sum is 0, up to rounding, the distribution stays.
    """
    inside = (index >= 0) & (index < vocab_size)
    logits = tl.load(logits_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
    target = _weights(logits, top) / total
    draft = target
    if RESIDUAL:
        draft = tl.load(draft_ptr + index, mask=inside, other=0.0)
        step = tl.arange(0, BLOCK_N)
        for number in range(num_rejected):
            token = tl.sum(tl.where(step == number, rejected, 0), axis=0)
            mass = tl.sum(tl.where(step == number, masses, 0.0), axis=0)
            rest = tl.sum(tl.where(step == number, rests, 0.0), axis=0)
            residual = tl.maximum(target - draft, 0.0) / tl.where(mass > 0.0, mass, 1.0)
            target = tl.where(mass > 0.0, residual, target)
            draft = tl.where(index == token, 0.0, draft) / tl.where(rest > 0.0, rest, 1.0)
    return target, draft


@triton.jit
def _judge(
    logits_ptr, draft_ptr, accept_ptr, tokens, drafted, sums, vocab_size, num_chunks, top, total,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Return the token of the accepted child or -1, the rejections and the chunk sums after them.

    `accept_ptr` has the uniforms of the row, in steps of two.
    """
    step, chunk = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_C)
    accepted = tl.full([], -1, tl.int64)
    rejected = tl.full([BLOCK_N], -1, tl.int64)
    masses = tl.zeros([BLOCK_N], tl.float32)
    rests = tl.zeros([BLOCK_N], tl.float32)
    num_rejected = tl.full([], 0, tl.int32)
    child = tl.min(tl.where(drafted, step, BLOCK_N), axis=0)
    while child < BLOCK_N:
        token = tl.sum(tl.where(step == child, tokens, 0), axis=0)
        p, q = _after_rejections(
            logits_ptr, draft_ptr, token, vocab_size, top, total,
            rejected, masses, rests, num_rejected, BLOCK_N, True,
        )  # fmt: skip
        fits = tl.load(accept_ptr + 2 * child) * q < p
        drafted = drafted & (step != child)
        if fits:
            accepted = token
        else:
            residuals = tl.zeros([BLOCK_C], tl.float32)
            rest = tl.full([], 0.0, tl.float32)
            for number in range(num_chunks):
                index = number * BLOCK_V + tl.arange(0, BLOCK_V)
                ps, qs = _after_rejections(
                    logits_ptr, draft_ptr, index, vocab_size, top, total,
                    rejected, masses, rests, num_rejected, BLOCK_N, True,
                )  # fmt: skip
                residual = tl.sum(tl.maximum(ps - qs, 0.0), axis=0)
                residuals = tl.where(chunk == number, residual, residuals)
                rest += tl.sum(tl.where(index == token, 0.0, qs), axis=0)
            mass = tl.sum(residuals, axis=0)
            sums = tl.where(mass > 0.0, residuals / tl.where(mass > 0.0, mass, 1.0), sums)
            rejected = tl.where(step == num_rejected, token, rejected)
            masses = tl.where(step == num_rejected, mass, masses)
            rests = tl.where(step == num_rejected, rest, rests)
            num_rejected += 1
        child = tl.where(fits, BLOCK_N, tl.min(tl.where(drafted, step, BLOCK_N), axis=0))
    return accepted, sums, rejected, masses, rests, num_rejected


@triton.jit(do_not_specialize=["max_accepted"])
def walk_kernel(
    logits_ptr, top_ptr, where_ptr, token_ptr, parent_ptr, row_start_ptr, uniforms_ptr, draft_ptr,
    packed_ptr,
    stride_logits, stride_draft, stride_uniforms, max_accepted, vocab_size, num_chunks,
    BLOCK_V: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr,
    SENTINEL: tl.constexpr, DRAW: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """One program per row."""
    row = tl.program_id(0).to(tl.int64)
    root = tl.load(row_start_ptr + row)
    end = tl.load(row_start_ptr + row + 1)
    step = tl.arange(0, BLOCK_N)
    offs_n = root + step
    tokens = tl.load(token_ptr + offs_n, mask=offs_n < end, other=-1)
    parents = tl.load(parent_ptr + offs_n, mask=offs_n < end, other=-1)
    path = tl.full([BLOCK_N], -1, tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    inside = chunk < num_chunks
    count = tl.full([], 0, tl.int64)
    bonus = tl.full([], -1, tl.int64)
    node = root
    walking = node < end
    while walking:
        stats = node * num_chunks + chunk
        tops = tl.load(top_ptr + stats, mask=inside, other=float("-inf"))
        drafted = (parents == node) & (tokens >= 0) & (offs_n < end)
        if DRAW:
            logits, draft = logits_ptr + node * stride_logits, draft_ptr + node * stride_draft
            top = tl.max(tops, axis=0)
            sums = tl.load(where_ptr + stats, mask=inside, other=0.0) * _weights(tops, top)
            total = tl.sum(sums, axis=0)
            # NaN where the logits have NaN or +inf, 0 where all are -inf: no token is found below.
            total = tl.where(total == 0.0, 1.0, total)
            sums /= total
            bonus = tl.full([], -1, tl.int64)
            rejected = tl.full([BLOCK_N], -1, tl.int64)
            masses = tl.zeros([BLOCK_N], tl.float32)
            rests = tl.zeros([BLOCK_N], tl.float32)
            num_rejected = tl.full([], 0, tl.int32)
            if RESIDUAL:
                bonus, sums, rejected, masses, rests, num_rejected = _judge(
                    logits, draft, uniforms_ptr + root * stride_uniforms + 1, tokens,
                    drafted, sums, vocab_size, num_chunks, top, total,
                    BLOCK_V, BLOCK_C, BLOCK_N,
                )  # fmt: skip
            if bonus < 0:
                goal = tl.load(uniforms_ptr + node * stride_uniforms) * tl.sum(sums, axis=0)
                chosen, before = _first_beyond(sums, goal, chunk, SENTINEL)
                index = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
                probs, _ = _after_rejections(
                    logits, draft, index, vocab_size, top, total,
                    rejected, masses, rests, num_rejected, BLOCK_N, RESIDUAL,
                )  # fmt: skip
                token, _ = _first_beyond(probs, goal - before, index, SENTINEL)
                bonus = token.to(tl.int64)
        else:
            indices = tl.load(where_ptr + stats, mask=inside, other=SENTINEL)
            _, best = _largest(tops, chunk, SENTINEL)
            token = tl.min(tl.where(chunk == best, indices, SENTINEL), axis=0)
            bonus = token.to(tl.int64)
        child = tl.min(tl.where(drafted & (tokens == bonus), step, BLOCK_N), axis=0)
        walking = child < BLOCK_N
        if walking:
            node = root + child
            path = tl.where(step == count, node, path)
            count += 1
    packed_ptr += row * (2 + max_accepted)
    tl.store(packed_ptr, count)
    tl.store(packed_ptr + 1, bonus)
    tl.store(packed_ptr + 2 + step, path, mask=step < max_accepted)


def verify_tree(
    logits: Tensor,
    token_ids: Tensor,
    parent: Tensor,
    row_start: Tensor,
    max_nodes: int,
    uniforms: Tensor | None,
    draft_probs: Tensor | None,
) -> Tensor:
    """Launch both kernels; see the package's function."""
    device = logits.device
    check_tensor("logits", logits, (None, None), DTYPES, device)
    num_nodes, vocab_size = logits.shape
    check_tensor("token_ids", token_ids, (num_nodes,), torch.int64, device)
    check_tensor("parent", parent, (num_nodes,), torch.int64, device)
    check_tensor("row_start", row_start, (None,), torch.int64, device)
    if uniforms is not None:
        shape = (num_nodes,) if draft_probs is None else (num_nodes, 2)
        check_tensor("uniforms", uniforms, shape, torch.float32, device)
        uniforms = uniforms.contiguous()
    if draft_probs is not None:
        check_tensor("draft_probs", draft_probs, logits.shape, torch.float32, device)
    if not vocab_size or not row_start.shape[0]:
        raise ValueError(f"logits {tuple(logits.shape)} of {row_start.shape[0] - 1} rows: no tree")
    num_rows, draw = row_start.shape[0] - 1, uniforms is not None
    max_accepted = max(max_nodes - 1, 0)
    packed = row_start.new_empty(num_rows, 2 + max_accepted)
    if not num_rows:
        return packed
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
    draft = top if draft_probs is None else draft_probs
    uniforms = top if uniforms is None else uniforms
    walk_kernel[(num_rows,)](
        logits, top, where, token_ids, parent, row_start, uniforms, draft, packed,
        logits.stride(0), draft.stride(0), uniforms.stride(0), max_accepted, vocab_size, num_chunks,
        BLOCK_V=chunk_size, BLOCK_C=triton.next_power_of_2(num_chunks),
        BLOCK_N=triton.next_power_of_2(max(max_nodes, 16)),
        SENTINEL=sentinel, DRAW=draw, RESIDUAL=draft_probs is not None,
    )  # fmt: skip
    return packed
