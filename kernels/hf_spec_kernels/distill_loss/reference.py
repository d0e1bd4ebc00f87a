"""Distillation loss with torch; the gradient is autograd's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from hf_spec_kernels.distill_loss import DistillWeights


def distill_loss_ref(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, weights: DistillWeights
) -> Tensor:
    """See `distill_loss`."""
    student, teacher = logits.float(), teacher_logits.detach().float()
    probs = teacher.softmax(dim=-1)
    wanted = (student / weights.temperature).log_softmax(dim=-1)
    # 0 log 0 = 0, here and in its gradient.
    soft = -(probs * wanted.masked_fill(probs == 0, 0.0)).sum()
    if weights.divergence == "kl":
        soft = soft - torch.special.entr(probs).sum()
    hard = F.nll_loss(
        student.log_softmax(dim=-1), labels.clamp_min(-1), ignore_index=-1, reduction="sum"
    )
    return weights.soft * soft + weights.hard * hard
