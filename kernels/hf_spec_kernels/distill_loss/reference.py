"""Distillation loss with torch; the gradient is autograd's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

DIVERGENCES = ("cross_entropy", "kl")


@dataclass(frozen=True)
class DistillWeights:
    """What the loss is made of.

    Attributes:
        soft: of the distance to the teacher's distribution.
        hard: of the cross-entropy with the labels.
        temperature: the student's logits are divided by it in the soft part, the teacher's are not.
        divergence: of the soft part, "cross_entropy" or "kl"; they differ by the teacher's entropy,
            which has no gradient.
    """

    soft: float = 1.0
    hard: float = 0.0
    temperature: float = 1.0
    divergence: str = "cross_entropy"

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise ValueError(f"divergence={self.divergence!r}; choose {' or '.join(DIVERGENCES)}")
        if self.temperature <= 0:
            raise ValueError(f"temperature={self.temperature!r} must be positive")


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
