"""The distillation loss and its gradient, against textbook formulas in float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hf_spec_kernels import DistillWeights, distill_loss, launches
from torch import Tensor

# For a loss of about 10 and gradients of about 1; 16-bit gradients are rounded to their dtype.
TOLERANCE = {torch.float32: 5e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
WEIGHTS = {
    "soft": DistillWeights(),
    "kl": DistillWeights(divergence="kl"),
    "hard": DistillWeights(soft=0.0, hard=1.0),
    "both, warm": DistillWeights(soft=0.09, hard=0.01, temperature=0.95),
    "both, hot, kl": DistillWeights(soft=0.7, hard=0.3, temperature=2.0, divergence="kl"),
}
LABELS = [3, -1, 36, -100, 0]


def inputs(vocab: int = 37, rows: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    labels = torch.tensor(LABELS[:rows]).clamp(max=vocab - 1)
    return torch.randn(rows, vocab) * 3, torch.randn(rows, vocab) * 3, labels


def textbook(z: Tensor, y: Tensor, labels: Tensor, weights: DistillWeights) -> Tensor:
    """Return the loss summed over positions, in float64, from log-probabilities of all tokens."""
    z, y = z.double(), y.double()
    teacher = y.softmax(dim=-1)
    soft = -(teacher * (z / weights.temperature).log_softmax(dim=-1)).sum()
    if weights.divergence == "kl":
        soft = soft + (teacher * y.log_softmax(dim=-1)).sum()
    own = z.log_softmax(dim=-1)
    hard = -torch.stack([own[t, n] for t, n in enumerate(labels.tolist()) if n >= 0]).sum()
    return weights.soft * soft + weights.hard * hard


def loss_and_gradient(loss: Any, z: Tensor, *rest: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    z = z.detach().requires_grad_()
    value = loss(z, *rest, **kwargs)
    # A factor other than 1, to test that the incoming gradient is used.
    (gradient,) = torch.autograd.grad(0.5 * value, z)
    return value.detach(), gradient


def check(
    z: Tensor, y: Tensor, labels: Tensor, weights: DistillWeights, impl: str = "triton"
) -> None:
    value, gradient = loss_and_gradient(distill_loss, z, y, labels, weights, impl=impl)
    right, right_gradient = loss_and_gradient(textbook, z, y, labels, weights)
    assert value.dtype == torch.float32
    assert gradient.dtype == z.dtype
    torch.testing.assert_close(value.double(), right, rtol=5e-6, atol=5e-6)
    atol = TOLERANCE[z.dtype]
    torch.testing.assert_close(gradient.double(), right_gradient.double(), atol=atol, rtol=0)


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_reference(name: str) -> None:
    check(*inputs(), WEIGHTS[name], impl="torch")


@pytest.mark.parametrize("name", WEIGHTS)
def test_the_kernel(name: str, device: torch.device, dtype: torch.dtype) -> None:
    z, y, labels = (tensor.to(device) for tensor in inputs())
    before = launches["distill_loss"]
    check(z.to(dtype), y.to(dtype), labels, WEIGHTS[name])
    assert launches["distill_loss"] == before + 1


@pytest.mark.parametrize("vocab", [1, 63, 1000, 9001])
def test_vocabularies_of_several_blocks(vocab: int, device: torch.device) -> None:
    z, y, labels = (tensor.to(device) for tensor in inputs(vocab, rows=2))
    check(z, y, labels, WEIGHTS["both, hot, kl"])


def test_large_logits_in_any_block(device: torch.device) -> None:
    """The running maximum rises late or early, at different tokens for student and teacher."""
    z, y, labels = (tensor.to(device) for tensor in inputs(9001, rows=4))
    z[0, 8999] = y[0, 10] = 300.0
    z[1, 10] = y[1, 8999] = 300.0
    z[2] += 1000.0
    y[3] -= 1000.0
    z[3, 8000] = y[3, 8000] = 200.0
    check(z, y, labels, WEIGHTS["both, warm"])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_masked_tokens(impl: str, device: torch.device) -> None:
    """0 log 0 = 0: where the teacher is masked, the student may be anything."""
    z, y, labels = (tensor.to(device) for tensor in inputs())
    y[:, 5:20] = -math.inf
    z[:, 10:20] = -math.inf
    weights = WEIGHTS["both, hot, kl"]
    value, gradient = loss_and_gradient(distill_loss, z, y, labels, weights, impl=impl)
    kept = torch.tensor([*range(10), *range(20, 37)], device=device)
    less = torch.where(labels > 19, labels - 10, labels)
    right, right_gradient = loss_and_gradient(
        textbook_masked, z[:, kept], y[:, kept], less, weights
    )
    torch.testing.assert_close(value.double(), right, rtol=5e-6, atol=0)
    torch.testing.assert_close(gradient[:, kept], right_gradient, atol=5e-6, rtol=0)
    assert not gradient[:, 10:20].any()


def textbook_masked(z: Tensor, y: Tensor, labels: Tensor, weights: DistillWeights) -> Tensor:
    """Return `textbook` with a finite value for -inf, whose probability is also 0 in float64."""
    return textbook(z, y.clamp(min=-1e4), labels, weights)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_student_that_excludes_what_the_teacher_says(impl: str, device: torch.device) -> None:
    z, y, labels = (tensor.to(device) for tensor in inputs())
    z[2, 7] = -math.inf
    assert distill_loss(z, y, labels, impl=impl) == math.inf


# In the interpreter, NumPy warns about the operations that give NaN.
@pytest.mark.filterwarnings("ignore:(invalid value|divide by zero):RuntimeWarning")
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_what_is_no_distribution_is_nan(impl: str, device: torch.device) -> None:
    for side in range(2):
        tensors = [tensor.to(device) for tensor in inputs()]
        tensors[side][1, 3] = math.nan
        assert distill_loss(*tensors, impl=impl).isnan()
    z, y, labels = (tensor.to(device) for tensor in inputs())
    y[1] = -math.inf
    assert distill_loss(z, y, labels, impl=impl).isnan()


def test_strides_are_free_and_places_may_be_missing(device: torch.device) -> None:
    z, y, labels = (tensor.to(device) for tensor in inputs(74))
    check(z[:, 37:], y[:, :37], labels, WEIGHTS["both, warm"])
    value, gradient = loss_and_gradient(distill_loss, z[:0], y[:0], labels[:0], impl="triton")
    assert value == 0
    assert gradient.shape == (0, 74)


def test_the_teacher_gets_no_gradient(device: torch.device) -> None:
    z, y, labels = (tensor.to(device) for tensor in inputs())
    for impl in ("torch", "triton"):
        teacher = y.clone().requires_grad_()
        distill_loss(z.requires_grad_(), teacher, labels, impl=impl).backward()
        assert teacher.grad is None


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"logits": torch.zeros(5, 37).double()}, TypeError, "logits is torch.float64"),
        ({"logits": torch.zeros(5, 0)}, ValueError, "teacher_logits has shape"),
        ({"logits": torch.zeros(37, 5).T}, ValueError, "logits has strides"),
        ({"teacher_logits": torch.zeros(5, 36)}, ValueError, "teacher_logits has shape"),
        ({"labels": torch.zeros(5)}, TypeError, "labels is torch.float32"),
        ({"labels": torch.zeros(4).long()}, ValueError, "labels has shape"),
    ],
)
def test_what_the_kernel_cannot_read_is_refused(
    change: dict[str, Any], error: type[Exception], match: str, device: torch.device
) -> None:
    names = ("logits", "teacher_logits", "labels")
    arguments = dict(zip(names, inputs(), strict=True)) | change
    moved = {name: value.to(device) for name, value in arguments.items()}
    if "strides" in match:
        moved["logits"] = change["logits"].T.to(device).T
    with pytest.raises(error, match=match):
        distill_loss(**moved, impl="triton")


@pytest.mark.parametrize(
    ("options", "match"),
    [({"divergence": "js"}, "divergence='js'"), ({"temperature": 0.0}, "temperature=0.0")],
)
def test_weights_are_checked(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        DistillWeights(**options)
