"""Reference of `distill_loss`, differentiated by autograd."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

DIVERGENCES = ("cross_entropy", "kl")


@dataclass(frozen=True)
class DistillWeights:
    """Weights and settings of the distillation loss.

    Attributes:
        soft: weight of the divergence from the teacher's distribution.
        hard: weight of the cross-entropy with the labels.
        temperature: divides the student's logits in the soft part, but not the teacher's.
        divergence: "cross_entropy" or "kl"; they differ by the teacher's entropy, which has no
            gradient.
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
    """Compute `distill_loss`."""
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
