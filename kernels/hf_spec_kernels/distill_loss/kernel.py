"""Distillation loss in Triton: one pass over both logits forward, one backward.

With z the student's logits, y the teacher's, s the temperature and p = softmax(y):

    soft = logsumexp(z / s) - sum p z / s  [ - (logsumexp(y) - sum p y) for KL ]
    hard = logsumexp(z) - z[label]
    d soft / d z = (softmax(z / s) - p) / s        d hard / d z = softmax(z) - onehot(label)

All sums are computed in one pass over the vocabulary, rescaled whenever a larger logit occurs. The
forward pass stores three log-sum-exps per position; the backward pass computes probabilities from
them.
"""
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False
# ruff: noqa: N803, PLR0913 - compile-time names are upper-case, pointers are many

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_spec_kernels.configs import vocabulary_config
from hf_spec_kernels.dispatch import DTYPES, check_tensor, launches
from hf_spec_kernels.distill_loss.reference import DistillWeights

OP = "distill_loss"


@triton.jit
def _raise_top(values, top):
    """Return the running maximum including a block, and the factor that rescales earlier sums."""
    new_top = tl.maximum(top, tl.max(values, axis=0))
    # The sum is 0 before the first finite value.
    return new_top, tl.where(top == float("-inf"), 0.0, tl.exp(top - new_top))


@triton.jit
def forward_kernel(
    student_ptr, teacher_ptr, label_ptr, loss_ptr, sums_ptr,
    stride_student, stride_teacher, vocab_size, soft, hard, inverse_temperature,
    BLOCK_V: tl.constexpr, KL: tl.constexpr,
):  # fmt: skip
    """Write losses (T,) float32 and sums (T, 3) float32: logsumexp of z / s, of z and of y."""
    row = tl.program_id(0).to(tl.int64)
    student_ptr += row * stride_student
    teacher_ptr += row * stride_teacher
    top_z = tl.full([], float("-inf"), tl.float32)
    top_y = tl.full([], float("-inf"), tl.float32)
    sum_z = tl.full([], 0.0, tl.float32)
    sum_soft = tl.full([], 0.0, tl.float32)
    sum_y = tl.full([], 0.0, tl.float32)
    cross = tl.full([], 0.0, tl.float32)
    own = tl.full([], 0.0, tl.float32)
    for start in range(0, vocab_size, BLOCK_V):
        index = start + tl.arange(0, BLOCK_V)
        mask = index < vocab_size
        z = tl.load(student_ptr + index, mask=mask, other=float("-inf")).to(tl.float32)
        y = tl.load(teacher_ptr + index, mask=mask, other=float("-inf")).to(tl.float32)
        new_z, shrink = _raise_top(z, top_z)
        # A block of only -inf adds nothing.
        base = tl.where(new_z == float("-inf"), 0.0, new_z)
        sum_z = sum_z * shrink + tl.sum(tl.exp(z - base), axis=0)
        shrink = tl.where(
            top_z == float("-inf"), 0.0, tl.exp((top_z - new_z) * inverse_temperature)
        )
        sum_soft = sum_soft * shrink + tl.sum(tl.exp((z - base) * inverse_temperature), axis=0)
        top_z = new_z
        top_y, shrink = _raise_top(y, top_y)
        base = tl.where(top_y == float("-inf"), 0.0, top_y)
        weight = tl.exp(y - base)
        sum_y = sum_y * shrink + tl.sum(weight, axis=0)
        # 0 log 0 = 0, also where a weight was rescaled to 0; NaN propagates.
        cross = tl.where(shrink == 0.0, 0.0, cross) * shrink
        cross += tl.sum(weight * tl.where(weight == 0.0, 0.0, z), axis=0)
        own = own * shrink + tl.sum(weight * tl.where(weight == 0.0, 0.0, y), axis=0)
    log_soft = top_z * inverse_temperature + tl.log(sum_soft)
    log_z = top_z + tl.log(sum_z)
    log_y = top_y + tl.log(sum_y)
    loss = soft * (log_soft - cross / sum_y * inverse_temperature)
    if KL:
        loss -= soft * (log_y - own / sum_y)
    label = tl.load(label_ptr + row)
    known = (label >= 0) & (label < vocab_size)
    chosen = tl.load(student_ptr + label, mask=known, other=float("nan")).to(tl.float32)
    loss += tl.where(label >= 0, hard * (log_z - chosen), 0.0)
    tl.store(loss_ptr + row, loss)
    tl.store(sums_ptr + row * 3, log_soft)
    tl.store(sums_ptr + row * 3 + 1, log_z)
    tl.store(sums_ptr + row * 3 + 2, log_y)


@triton.jit
def backward_kernel(
    student_ptr, teacher_ptr, label_ptr, sums_ptr, upstream_ptr, grad_ptr,
    stride_student, stride_teacher, vocab_size, soft, hard, inverse_temperature,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (T, blocks): grad (T, V) in the student's dtype."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    mask = index < vocab_size
    z = tl.load(student_ptr + row * stride_student + index, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(teacher_ptr + row * stride_teacher + index, mask=mask, other=0.0).to(tl.float32)
    log_soft = tl.load(sums_ptr + row * 3)
    log_z = tl.load(sums_ptr + row * 3 + 1)
    log_y = tl.load(sums_ptr + row * 3 + 2)
    label = tl.load(label_ptr + row)
    grad = tl.exp(z * inverse_temperature - log_soft) - tl.exp(y - log_y)
    grad *= soft * inverse_temperature
    right = tl.where(index == label, 1.0, 0.0)
    grad += tl.where(label >= 0, hard * (tl.exp(z - log_z) - right), 0.0)
    grad *= tl.load(upstream_ptr).to(tl.float32)
    address = grad_ptr + row * vocab_size + index
    tl.store(address, grad.to(grad_ptr.dtype.element_ty), mask=mask)


def _numbers(logits: Tensor, teacher_logits: Tensor, weights: DistillWeights) -> tuple[Any, ...]:
    """Return the arguments of both kernels after their pointers."""
    scales = (float(weights.soft), float(weights.hard), 1.0 / weights.temperature)
    return logits.stride(0), teacher_logits.stride(0), logits.shape[1], *scales


class _DistillLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, teacher_logits: Tensor, labels: Tensor, weights: DistillWeights
    ) -> Tensor:
        num_rows = logits.shape[0]
        loss = logits.new_empty(num_rows, dtype=torch.float32)
        sums = logits.new_empty(num_rows, 3, dtype=torch.float32)
        ctx.save_for_backward(logits, teacher_logits, labels, sums)
        ctx.weights = weights
        if num_rows:
            launches[OP] += 1
            tensors = (logits, teacher_logits, labels, loss, sums)
            numbers = _numbers(logits, teacher_logits, weights)
            tile = vocabulary_config(OP, logits)
            forward_kernel[(num_rows,)](*tensors, *numbers, KL=weights.divergence == "kl", **tile)
        return loss.sum()

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        logits, teacher_logits, labels, sums = ctx.saved_tensors
        num_rows, vocab_size = logits.shape
        grad = logits.new_empty(num_rows, vocab_size)
        tile = vocabulary_config(OP, logits)
        if num_rows:
            tensors = (logits, teacher_logits, labels, sums, upstream, grad)
            numbers = _numbers(logits, teacher_logits, ctx.weights)
            grid = (num_rows, triton.cdiv(vocab_size, tile["BLOCK_V"]))
            backward_kernel[grid](*tensors, *numbers, **tile)
        return grad, None, None, None


def distill_loss(
    logits: Tensor, teacher_logits: Tensor, labels: Tensor, weights: DistillWeights
) -> Tensor:
    """Launch the kernels; see the package's function."""
    device = logits.device
    check_tensor("logits", logits, (None, None), DTYPES, device)
    check_tensor("teacher_logits", teacher_logits, tuple(logits.shape), DTYPES, device)
    check_tensor("labels", labels, (logits.shape[0],), torch.int64, device)
    if not logits.shape[1]:
        raise ValueError(f"logits has shape {tuple(logits.shape)}: an empty vocabulary")
    loss: Tensor = _DistillLoss.apply(logits, teacher_logits, labels, weights)
    return loss
