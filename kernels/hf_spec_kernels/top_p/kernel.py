"""`filter_top_p` in Triton: a search for the threshold, one program per row.

Scores are compared as integers of the same order. Each pass over the row sums the weights up to
three candidate thresholds and so decides two bits; 16 passes decide all 32. The row stays in the L2
cache meanwhile. The last pass writes, and counts the tokens that equal the threshold to remove the
first of them.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0124, PLR0913 - upper-case names at compile time, x != x for NaN, pointers

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.dispatch import check_tensor, launches

OP = "top_p"
BLOCK_V, NUM_WARPS = 4096, 8


@triton.jit
def _ordered(scores):
    """Return int64 with the order of the float32 scores; 0.0 and -0.0 are equal."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).to(tl.int64)


@triton.jit
def _masses(scores_ptr, vocab_size, top, low, step, BLOCK_V: tl.constexpr):
    """Return the sums of exp(score - top) of all scores up to `low` + 1, 2 and 3 `step`s."""
    sums_1 = tl.zeros([BLOCK_V], tl.float32)
    sums_2 = tl.zeros([BLOCK_V], tl.float32)
    sums_3 = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        scores = tl.load(scores_ptr + index, mask=index < vocab_size, other=float("-inf"))
        order, weights = _ordered(scores), tl.exp(scores - top)
        sums_1 += tl.where(order <= low + step, weights, 0.0)
        sums_2 += tl.where(order <= low + 2 * step, weights, 0.0)
        sums_3 += tl.where(order <= low + 3 * step, weights, 0.0)
    return tl.sum(sums_1, axis=0), tl.sum(sums_2, axis=0), tl.sum(sums_3, axis=0)


@triton.jit
def top_p_kernel(
    scores_ptr, out_ptr, stride_scores, vocab_size, removed_share, filter_value,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (N,); `out_ptr` is (N, V) float32, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_scores
    out_ptr += row * vocab_size
    offs = tl.arange(0, BLOCK_V)
    tops = tl.full([BLOCK_V], float("-inf"), tl.float32)
    nans = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + offs
        scores = tl.load(scores_ptr + index, mask=index < vocab_size, other=float("-inf"))
        nans += (scores != scores).to(tl.int32)
        tops = tl.maximum(tops, tl.where(scores != scores, float("-inf"), scores))
    top = tl.max(tops, axis=0)
    defined = (tl.sum(nans, axis=0) == 0) & (top > float("-inf")) & (top < float("inf"))
    sums = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + offs
        scores = tl.load(scores_ptr + index, mask=index < vocab_size, other=float("-inf"))
        sums += tl.exp(scores - top)
    goal = removed_share * tl.sum(sums, axis=0)
    # All scores up to `low` are removed; the largest possible value is below that of the top.
    low = tl.full([], -(2**31), tl.int64)
    before = tl.full([], 0.0, tl.float32)
    most = _ordered(top)
    step = tl.full([], 2**30, tl.int64)
    for _ in range(16):
        mass_1, mass_2, mass_3 = _masses(scores_ptr, vocab_size, top, low, step, BLOCK_V)
        fits_1 = (mass_1 <= goal) & (low + step < most)
        fits_2 = (mass_2 <= goal) & (low + 2 * step < most)
        fits_3 = (mass_3 <= goal) & (low + 3 * step < most)
        before = tl.where(
            fits_3, mass_3, tl.where(fits_2, mass_2, tl.where(fits_1, mass_1, before))
        )
        low += step * (fits_1.to(tl.int64) + fits_2.to(tl.int64) + fits_3.to(tl.int64))
        step = step // 4
    ties = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + offs
        scores = tl.load(scores_ptr + index, mask=index < vocab_size, other=float("-inf"))
        ties += ((_ordered(scores) == low + 1) & (index < vocab_size)).to(tl.int32)
    num_ties = tl.sum(ties, axis=0)
    met = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + offs
        inside = index < vocab_size
        scores = tl.load(scores_ptr + index, mask=inside, other=float("-inf"))
        order = _ordered(scores)
        tied = ((order == low + 1) & inside).to(tl.int32)
        rank = met + tl.cumsum(tied, axis=0)
        reached = before + rank.to(tl.float32) * tl.exp(scores - top)
        first = (tied > 0) & (rank < num_ties) & (reached <= goal)
        removed = defined & ((order <= low) | first)
        tl.store(out_ptr + index, tl.where(removed, filter_value, scores), mask=inside)
        met += tl.sum(tied, axis=0)


def filter_top_p(scores: Tensor, top_p: float, filter_value: float) -> Tensor:
    """Launch the kernel; see the package's function."""
    check_tensor("scores", scores, (None, None), torch.float32, scores.device)
    num_rows, vocab_size = scores.shape
    out = scores.new_empty(num_rows, vocab_size)
    if not out.numel():
        return out
    launches[OP] += 1
    widest = max(16, triton.next_power_of_2(vocab_size))
    top_p_kernel[(num_rows,)](
        scores, out, scores.stride(0), vocab_size, 1 - top_p, filter_value,
        BLOCK_V=min(BLOCK_V, widest), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
