"""`filter_scores` in Triton: two searches for thresholds, one program per row.

Scores are compared as integers of the same order. Each pass over the row counts the scores (top-k),
or sums the weights (top-p), up to three candidate thresholds and so decides two bits; 16 passes
decide all 32. The row stays in the L2 cache meanwhile. The last pass writes, and counts the tokens
that equal the threshold of top-p to remove the first of them.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0124, PLR0913 - upper-case names at compile time, x != x for NaN, pointers

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches

OP = "filter_scores"
BLOCK_V, NUM_WARPS = 4096, 8


@triton.jit
def _ordered(scores):
    """Return int32 with the order of the float32 scores; 0.0 and -0.0 are equal, NaN is largest."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    order = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    return tl.where(scores != scores, 0x7FFFFFFF, order)


@triton.jit
def _masses(
    scores_ptr, vocab_size, top, floor, first, second, third,
    COUNT: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Return the sums of all scores above `floor` and up to each of three thresholds.

    Each score counts 1, or exp(score - top).
    """
    sums_1 = tl.zeros([BLOCK_V], tl.float32)
    sums_2 = tl.zeros([BLOCK_V], tl.float32)
    sums_3 = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        inside = index < vocab_size
        scores = tl.load(scores_ptr + index, mask=inside, other=float("-inf"))
        order = _ordered(scores)
        weights = inside.to(tl.float32)
        if not COUNT:
            weights = tl.where(order > floor, tl.exp(scores - top), 0.0)
        sums_1 += tl.where(order <= first, weights, 0.0)
        sums_2 += tl.where(order <= second, weights, 0.0)
        sums_3 += tl.where(order <= third, weights, 0.0)
    return tl.sum(sums_1, axis=0), tl.sum(sums_2, axis=0), tl.sum(sums_3, axis=0)


@triton.jit
def _threshold(
    scores_ptr, vocab_size, top, floor, goal, COUNT: tl.constexpr, BLOCK_V: tl.constexpr
):
    """Return the largest threshold below `top` up to which the sum is at most `goal`, and the sum.

    All scores up to it are removed.
    """
    most = _ordered(top)
    before = tl.full([], 0.0, tl.float32)
    low = tl.full([], -(2**31), tl.int32)
    step = tl.full([], 2**30, tl.int32)
    for _ in range(16):
        # At most 2**31 - 1.
        first, second, third = low + step, low + 2 * step, low + 3 * step
        mass_1, mass_2, mass_3 = _masses(
            scores_ptr, vocab_size, top, floor, first, second, third, COUNT, BLOCK_V
        )
        fits_1 = (mass_1 <= goal) & (first < most)
        fits_2 = (mass_2 <= goal) & (second < most)
        fits_3 = (mass_3 <= goal) & (third < most)
        before = tl.where(
            fits_3, mass_3, tl.where(fits_2, mass_2, tl.where(fits_1, mass_1, before))
        )
        low += step * (fits_1.to(tl.int32) + fits_2.to(tl.int32) + fits_3.to(tl.int32))
        step = step // 4
    return low, before


@triton.jit
def filter_kernel(
    scores_ptr, filters_ptr, out_ptr, stride_scores, stride_filters, vocab_size,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (N,); `out_ptr` is (N, V) float32, contiguous, and holds the divided scores between."""
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * stride_scores
    filters_ptr += row * stride_filters
    out_ptr += row * vocab_size
    temperature = tl.load(filters_ptr)
    top_k = tl.load(filters_ptr + 1)
    removed_share = tl.load(filters_ptr + 2)
    min_p = tl.load(filters_ptr + 3)
    # Padding is not read.
    vocab_size = tl.where(temperature > 0.0, vocab_size, 0)
    tops = tl.full([BLOCK_V], float("-inf"), tl.float32)
    nans = tl.zeros([BLOCK_V], tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        inside = index < vocab_size
        scores = tl.load(scores_ptr + index, mask=inside, other=float("-inf")).to(tl.float32)
        scores = tl.div_rn(scores, temperature)
        nans += (scores != scores).to(tl.int32)
        tops = tl.maximum(tops, tl.where(scores != scores, float("-inf"), scores))
        tl.store(out_ptr + index, scores, mask=inside)
    # The other threads of the program read these.
    tl.debug_barrier()
    top, num_nans = tl.max(tops, axis=0), tl.sum(nans, axis=0)
    defined = (num_nans == 0) & (top > float("-inf")) & (top < float("inf"))
    low = tl.full([], -(2**31), tl.int32)
    before = tl.full([], 0.0, tl.float32)
    goal = tl.full([], -1.0, tl.float32)
    num_ties = tl.full([], 0, tl.int32)
    # If the k-th largest is NaN, none is below it.
    if (top_k > 0.0) & (top_k < vocab_size) & (num_nans < top_k):
        low, _ = _threshold(out_ptr, vocab_size, top, low, vocab_size - top_k, True, BLOCK_V)
    if defined & (removed_share >= 0.0):
        # No score is above `top`.
        most = _ordered(top)
        total, _, _ = _masses(out_ptr, vocab_size, top, low, most, most, most, False, BLOCK_V)
        goal = removed_share * total
        low, before = _threshold(out_ptr, vocab_size, top, low, goal, False, BLOCK_V)
        below, up_to, _ = _masses(
            out_ptr, vocab_size, top, low, low, low + 1, low + 1, True, BLOCK_V
        )
        num_ties = (up_to - below).to(tl.int32)
    met = tl.full([], 0, tl.int32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        inside = index < vocab_size
        scores = tl.load(out_ptr + index, mask=inside, other=float("-inf"))
        order = _ordered(scores)
        tied = ((order == low + 1) & inside).to(tl.int32)
        rank = met + tl.cumsum(tied, axis=0)
        weights = tl.exp(scores - tl.where(defined, top, 0.0))
        first = (tied > 0) & (rank < num_ties) & (before + rank.to(tl.float32) * weights <= goal)
        removed = (order <= low) | first | (defined & (weights < min_p))
        tl.store(out_ptr + index, tl.where(removed, float("-inf"), scores), mask=inside)
        met += tl.sum(tied, axis=0)


def filter_scores(scores: Tensor, filters: Tensor) -> Tensor:
    """Launch the kernel; see the package's function."""
    check_tensor("scores", scores, (None, None), DTYPES, scores.device)
    num_rows, vocab_size = scores.shape
    check_tensor("filters", filters, (num_rows, 4), torch.float32, scores.device)
    out = scores.new_empty(num_rows, vocab_size, dtype=torch.float32)
    if not out.numel():
        return out
    launches[OP] += 1
    widest = max(16, triton.next_power_of_2(vocab_size))
    filter_kernel[(num_rows,)](
        scores, filters, out, scores.stride(0), filters.stride(0), vocab_size,
        BLOCK_V=min(BLOCK_V, widest), num_warps=NUM_WARPS,
    )  # fmt: skip
    return out
