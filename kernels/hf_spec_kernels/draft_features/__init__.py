"""Features of draft distributions for a stop classifier, in one pass over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.draft_features.reference import draft_features_ref


def draft_features(draft_probs: Tensor, num_top: int = 10, impl: str = "auto") -> Tensor:
    """Return the largest probabilities and the entropy of distributions.

    Args:
        draft_probs: (M, V), rows that sum to 1 without NaN; any strides but the last, which is 1.
        num_top: k, number of probabilities, 1 to 32; smaller vocabularies are padded with zeros.
        impl: see the package.

    Returns:
        (M, k + 1) float32: the k largest probabilities in descending order, then the entropy in
        nats (0 log 0 = 0).
    """
    if not 1 <= num_top <= 32:
        raise ValueError(f"num_top={num_top!r} must be between 1 and 32")
    if not serves(draft_probs, impl):
        return draft_features_ref(draft_probs, num_top)
    from hf_spec_kernels.draft_features import kernel

    with torch.cuda.device_of(draft_probs):
        return kernel.draft_features(draft_probs, num_top)
