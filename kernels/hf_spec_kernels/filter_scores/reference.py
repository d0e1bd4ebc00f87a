"""Reference of `filter_scores`, by sorts as in transformers."""

from __future__ import annotations

import torch
from torch import Tensor


def filter_scores_ref(scores: Tensor, filters: Tensor) -> Tensor:
    """Compute `filter_scores`."""
    temperature, top_k, removed_share, min_p = filters[:, :, None].unbind(dim=1)
    scores = scores.float() / temperature
    ascending, order = scores.sort(dim=-1, stable=True)
    last = scores.shape[-1] - top_k.long().clamp(1, scores.shape[-1])
    scores = scores.masked_fill((top_k > 0) & (scores < ascending.gather(1, last)), -torch.inf)
    probs = scores.softmax(dim=-1)
    removed = probs.gather(1, order).cumsum(dim=-1) <= removed_share
    removed[:, -1:] = False
    scores = scores.masked_fill(removed.scatter(-1, order, removed), -torch.inf)
    probs = scores.softmax(dim=-1)
    return scores.masked_fill(probs < min_p * probs.amax(dim=-1, keepdim=True), -torch.inf)
