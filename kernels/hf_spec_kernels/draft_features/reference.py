"""Reference of `draft_features`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def draft_features_ref(draft_probs: Tensor, num_top: int) -> Tensor:
    """Compute `draft_features`."""
    probs = draft_probs.float()
    top = probs.topk(min(num_top, probs.shape[-1]), dim=-1).values
    top = F.pad(top, (0, num_top - top.shape[-1]))
    return torch.cat([top, torch.special.entr(probs).sum(dim=-1, keepdim=True)], dim=-1)
