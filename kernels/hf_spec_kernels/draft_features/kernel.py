"""Largest probabilities and entropy in Triton, one program per distribution.

A program stores the k largest values so far. From each block it takes the maximum while that
exceeds the smallest stored value, which is rare after the first blocks.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0913 - compile-time names are upper-case, arguments many

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.configs import vocabulary_config
from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches

OP = "draft_features"


@triton.jit
def draft_features_kernel(
    probs_ptr, out_ptr, stride_probs, vocab_size,
    NUM_TOP: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Write (M, NUM_TOP + 1) float32 to `out_ptr`."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    # Unused columns hold inf, which is never replaced.
    best = tl.where(column < NUM_TOP, 0.0, float("inf"))
    entropy = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        mask = index < vocab_size
        probs = tl.load(probs_ptr + row * stride_probs + index, mask=mask, other=0.0)
        probs = probs.to(tl.float32)
        entropy -= probs * tl.log(tl.where(probs > 0.0, probs, 1.0))
        largest = tl.max(probs, axis=0)
        smallest = tl.min(best, axis=0)
        while largest > smallest:
            taken = tl.min(tl.where(probs == largest, index, vocab_size), axis=0)
            probs = tl.where(index == taken, 0.0, probs)
            given = tl.min(tl.where(best == smallest, column, BLOCK_K), axis=0)
            best = tl.where(column == given, largest, best)
            largest = tl.max(probs, axis=0)
            smallest = tl.min(best, axis=0)
    out_ptr += row * (NUM_TOP + 1)
    tl.store(out_ptr + NUM_TOP, tl.sum(entropy, axis=0))
    best = tl.where(column < NUM_TOP, best, -1.0)
    for rank in range(NUM_TOP):
        largest = tl.max(best, axis=0)
        tl.store(out_ptr + rank, largest)
        taken = tl.min(tl.where(best == largest, column, BLOCK_K), axis=0)
        best = tl.where(column == taken, -1.0, best)


def draft_features(draft_probs: Tensor, num_top: int) -> Tensor:
    """Launch the kernel; see the package's function."""
    check_tensor("draft_probs", draft_probs, (None, None), DTYPES, draft_probs.device)
    num_rows, vocab_size = draft_probs.shape
    out = draft_probs.new_empty(num_rows, num_top + 1, dtype=torch.float32)
    if not num_rows:
        return out
    launches[OP] += 1
    draft_features_kernel[(num_rows,)](
        draft_probs, out, draft_probs.stride(0), vocab_size,
        NUM_TOP=num_top, BLOCK_K=triton.next_power_of_2(num_top),
        **vocabulary_config(OP, draft_probs),
    )  # fmt: skip
    return out
