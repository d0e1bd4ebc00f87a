"""Distillation loss of a student's logits, without materialized log-probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_spec_kernels.dispatch import serves
from hf_spec_kernels.distill_loss.reference import DistillWeights, distill_loss_ref


def distill_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    labels: Tensor,
    weights: DistillWeights | None = None,
    impl: str = "auto",
) -> Tensor:
    """Return the sum over positions of soft * D(teacher, student) + hard * -log student(label).

    Args:
        logits: (T, V) of the student, with last stride 1. Only they get a gradient.
        teacher_logits: (T, V). Tokens with teacher probability 0 are ignored, even if the student's
            logit is -inf; otherwise a student logit of -inf gives an infinite loss. Logits with NaN
            or +inf, or all -inf, give NaN.
        labels: (T,) int64 below V; a negative label skips the hard part at its position.
        weights: only soft cross-entropy by default.
        impl: see the package.

    Returns:
        () float32.
    """
    weights = weights or DistillWeights()
    if not serves(logits, impl):
        return distill_loss_ref(logits, teacher_logits, labels, weights)
    from hf_spec_kernels.distill_loss import kernel

    with torch.cuda.device_of(logits):
        return kernel.distill_loss(logits, teacher_logits, labels, weights)
