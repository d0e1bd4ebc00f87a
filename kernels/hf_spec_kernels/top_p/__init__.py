"""Nucleus filter of scores (top-p) without sorting the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.top_p.reference import filter_top_p_ref


def filter_top_p(
    scores: Tensor, top_p: float, filter_value: float = -float("inf"), impl: str = "auto"
) -> Tensor:
    """Return scores in which tokens outside the nucleus are `filter_value`; one is always kept.

    In ascending order of probability, the tokens whose cumulative probability is at most
    1 - `top_p` are removed. Of equally probable tokens, those with small ids are removed first, as
    by a stable sort. Sums are float32, so a token whose cumulative probability equals the threshold
    up to rounding may go either way. A row with NaN, +inf, or only -inf is returned as it is.

    Args:
        scores: (N, V) float32, with last stride 1.
        top_p: between 0 and 1.
        filter_value: score of removed tokens.
        impl: see the package.
    """
    if not serves(scores, impl):
        return filter_top_p_ref(scores, top_p, filter_value)
    from hf_spec_kernels.top_p import kernel

    with torch.cuda.device_of(scores):
        return kernel.filter_top_p(scores, top_p, filter_value)
