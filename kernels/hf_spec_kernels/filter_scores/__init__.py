"""Temperature, top-k, top-p, and min-p of scores without sorting the vocabulary."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.filter_scores.reference import filter_scores_ref


class Filter(NamedTuple):
    """Settings of a row, applied in this order; the defaults change nothing.

    Attributes:
        temperature: divisor of the scores; 0 for a row whose result is not read.
        top_k: number of scores that stay, beside those that equal the last of them; 0 for all.
        removed_share: 1 - top-p; negative for all.
        min_p: smallest probability, as a share of the largest; 0 for all.
    """

    temperature: float = 1.0
    top_k: int = 0
    removed_share: float = -1.0
    min_p: float = 0.0


def filter_scores(scores: Tensor, filters: Tensor, impl: str = "auto") -> Tensor:
    """Return (N, V) float32 scores divided by the temperature, with -inf for removed tokens.

    Removes what `TopKLogitsWarper`, `TopPLogitsWarper` and `MinPLogitsWarper` of transformers
    remove, one after the other. Top-k keeps all scores that equal the k-th largest. Top-p removes,
    in ascending order of probability, the tokens whose cumulative probability is at most
    1 - top-p, but the last one. Of equally probable tokens, those with small ids are removed first,
    as by a stable sort. Sums are float32, so a token whose cumulative probability equals the
    threshold up to rounding may go either way. Top-p and min-p remove nothing from a row with NaN,
    +inf, or only -inf.

    Args:
        scores: (N, V), with last stride 1.
        filters: (N, 4) float32, a `Filter` per row.
        impl: see the package.
    """
    if not serves(scores, impl):
        return filter_scores_ref(scores, filters)
    from hf_spec_kernels.filter_scores import kernel

    with torch.cuda.device_of(scores):
        return kernel.filter_scores(scores, filters)
