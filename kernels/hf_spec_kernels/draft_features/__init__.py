"""What a stop classifier reads from draft distributions, in one pass over the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.draft_features.reference import draft_features_ref


def draft_features(draft_probs: Tensor, num_top: int = 10, impl: str = "auto") -> Tensor:
    """The largest probabilities and the entropy of distributions.

    Args:
        draft_probs: (M, V), rows that sum to 1 without NaN; any strides but the last, which is 1.
        num_top: k, how many probabilities; 1 to 32. Smaller vocabularies count as having tokens of
            probability 0.
        impl: see the package.

    Returns:
        (M, k + 1) float32: the k largest in descending order, the entropy in nats of the whole
        distribution (0 log 0 = 0).
    """
    if not 1 <= num_top <= 32:
        raise ValueError(f"num_top={num_top!r} must be between 1 and 32")
    if not serves(draft_probs, impl):
        return draft_features_ref(draft_probs, num_top)
    from hf_spec_kernels.draft_features import kernel

    with torch.cuda.device_of(draft_probs):
        return kernel.draft_features(draft_probs, num_top)
