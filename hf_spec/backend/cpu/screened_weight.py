"""The best outputs of a large linear layer, without computing all of them exactly.

Greedy decoding reads the argmax of the logits alone. A copy of the output head in 8 bits gives
scores that are off by a known bound; only outputs that can still be the best are computed with the
exact weight, a few out of 150,000. In memory the copy is a half of a head in bfloat16 and a quarter
of one in float32, and a matmul of few rows takes as long as reading its weight.

The argmax is that of all outputs, ties included: an output is left out only if its upper bound,
rounded as outputs are, is below the rounded lower bound of another.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from hf_spec_kernels.packed_linear import PackedWeight, pack_weight, packed_linear
from torch import Tensor

from hf_spec.backend.cpu.packed_gemm import fastest_seconds, gemm

# Weights with fewer elements are multiplied faster than they are screened.
MIN_ELEMENTS = 1 << 22
# Numbers of rows at which screening is timed, and the required speedup: rows of other texts leave
# more outputs to compute than repeated ones.
TIMED_ROWS = (1, 2, 4, 6, 8, 12, 16)
HEAD_START = 1.25
# More blocks than this fraction are not faster to compute than all.
MOST_BLOCKS = 1 / 8
LARGEST_CODE = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
# Sums of K products in float32, in any order, are off by at most K u |x| |w|, with u = 2**-24 and
# the norms of the states and of the weight. Scores and outputs are two such sums; the scales, the
# margins and their use add a few roundings. (K + 2) times this covers all of them up to 2**17
# inputs, relative to |x| |w|; relative to the margin, it covers the rounding of the norms.
ROUNDING = 2.0**-22
# Underflow. A norm may lose numbers below 2**-63, whose squares are flushed to zero; K times the
# first covers them. It also covers flushed products for states with at least the second as norm.
UNDERFLOW = 2.0**-62
LEAST_NORM = 2.0**-40
# Overflow. Norms of the states and slacks below this leave every sum finite.
OVERFLOW = 2.0**62
# Rows of a weight that are rounded together, in elements; they stay in a cache.
ROUNDED_TOGETHER = 1 << 19


@dataclass(frozen=True)
class ScreenedWeight:
    """An (N, K) weight with its scores in 8 bits.

    Attributes:
        exact: the weight as outputs are computed with it.
        codes: (N, K) int8, packed for states in float32.
        scales: (N,) float32; codes times these are close to the weight.
        margins: (N,) float32; a score is off by at most this times the norm of the states, which
            counts as `LEAST_NORM` if it is smaller.
        most_rows: for how many rows screening is faster; 0 for none.
    """

    exact: PackedWeight
    codes: PackedWeight
    scales: Tensor
    margins: Tensor
    most_rows: int = 0

    @property
    def nbytes(self) -> int:
        """Memory in bytes, without the exact weight."""
        return self.codes.nbytes + self.scales.nbytes + self.margins.nbytes

    @cached_property
    def largest_margin(self) -> Tensor:
        """The largest of the margins."""
        return self.margins.max()

    def best(self, states: Tensor) -> Tensor | None:
        """Compute the outputs that can be the best of their row.

        Args:
            states: (R, K), in the dtype of the weight.

        Returns:
            (R, N) outputs as `packed_linear` computes them, others are -inf; None if too many can
            be the best, or sums might not be finite.
        """
        exact, wide = self.exact, states.float()
        scores = packed_linear(wide, self.codes).mul_(self.scales)
        norms, top = wide.norm(dim=1).clamp_min_(LEAST_NORM), scores.amax(dim=1)
        # First by the largest margin of all outputs, which leaves few to look at one by one.
        slack = 2 * norms * self.largest_margin
        # False for NaN.
        if not bool((norms + slack < OVERFLOW).all()):
            return None
        # Sums that round to the same output differ by less than `eps` of the larger one, which is
        # at most the top score and its margin.
        floor = top - slack - 2 * torch.finfo(states.dtype).eps * (top.abs() + slack)
        rows, outputs = (scores >= floor[:, None]).nonzero(as_tuple=True)
        scores, slack = scores[rows, outputs], norms[rows] * self.margins[outputs]
        least = floor.scatter_reduce(0, rows, scores - slack, "amax").to(states.dtype)
        # Rounding keeps the order of outputs, but equal ones count by their index.
        possible = outputs[(scores + slack).to(states.dtype) >= least[rows]]
        size = exact.blocks.shape[2]
        blocks = possible.div_(size, rounding_mode="floor").unique()
        if len(blocks) > len(exact.blocks) * MOST_BLOCKS:
            return None
        some = replace(exact, blocks=exact.blocks[blocks], num_outputs=len(blocks) * size)
        computed = packed_linear(states, some).view(len(states), len(blocks), size)
        found = states.new_full((len(states), len(exact.blocks), size), -math.inf)
        found[:, blocks] = computed
        return found.view(len(states), -1)[:, : exact.num_outputs]


@torch.no_grad()
def screen(weight: Tensor, exact: PackedWeight) -> ScreenedWeight:
    """Round an (N, K) weight in float32 or bfloat16 to 8 bits, with a scale per output.

    `exact` is the same weight from `pack_weight`.
    """
    num_outputs, num_inputs = weight.shape
    codes = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
    scales, margins = torch.empty(2, num_outputs, dtype=torch.float32)
    size = max(1, ROUNDED_TOGETHER // num_inputs)
    for first in range(0, num_outputs, size):
        part = slice(first, first + size)
        wide = weight[part].float()
        norms = wide.norm(dim=1)
        scale = wide.abs().amax(dim=1).div_(LARGEST_CODE).clamp_min_(SMALLEST_SCALE)
        rounded = (wide / scale[:, None]).round_()
        codes[part], scales[part] = rounded, scale
        error = rounded.mul_(scale[:, None]).sub_(wide).norm(dim=1)
        margins[part] = error.add_(norms, alpha=(num_inputs + 2) * ROUNDING)
    margins.add_(num_inputs * UNDERFLOW).mul_(1 + (num_inputs + 2) * ROUNDING)
    return ScreenedWeight(exact, pack_weight(codes, torch.float32), scales, margins)


@torch.no_grad()
def timed(weight: ScreenedWeight, states: Tensor) -> ScreenedWeight:
    """Set `most_rows` by timing (R, K) states that the layer has seen, R at least 1."""
    most = 0
    for rows in TIMED_ROWS:
        some = states[torch.arange(rows) % len(states)]
        full, screened = fastest_seconds(
            some, (gemm, [weight.exact]), (lambda states, form: form.best(states), [weight])
        )
        if screened * HEAD_START > full:
            break
        most = rows
    return replace(weight, most_rows=most)
