"""Distance of a student's logits to a teacher's, without tables of log-probabilities."""

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
    """Sum over places of soft * D(teacher, student) + hard * -log student(label).

    Args:
        logits: (T, V) of the student, any strides but the last, which is 1. Only they get a
            gradient.
        teacher_logits: (T, V). Where the teacher has probability 0 the student's logit does not
            matter, even if it is -inf; where it has some, a student of -inf makes the loss
            infinite. Logits with NaN or +inf, or all -inf, make it NaN.
        labels: (T,) int64 below V; a negative one leaves the hard part of its place out.
        weights: soft cross-entropy alone by default.
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
