"""Features of draft distributions: largest probabilities and entropy."""

from __future__ import annotations

import math

import pytest
import torch
from hf_spec_kernels import draft_features, launches
from torch import Tensor

# Rounding of sums over the vocabulary, which are in float32 for 16-bit inputs, too.
TOLERANCE = 5e-6


def distributions(rows: int, vocab: int, sharpness: float = 3.0) -> Tensor:
    torch.manual_seed(vocab)
    return (torch.randn(rows, vocab) * sharpness).softmax(dim=-1)


def test_the_reference_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.0, 0.25, 0.25], [0.0, 1.0, 0.0, 0.0]])
    found = draft_features(probs, 3, impl="torch")
    expected = torch.tensor([[0.5, 0.25, 0.25, 1.5 * math.log(2)], [1.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("vocab", [1, 4, 63, 1000, 5003])
def test_the_kernel(vocab: int, device: torch.device, dtype: torch.dtype) -> None:
    probs = distributions(3, vocab).to(device, dtype)
    before = launches["draft_features"]
    found = draft_features(probs, impl="triton")
    assert launches["draft_features"] == before + 1
    assert found.shape == (3, 11)
    assert found.dtype == torch.float32
    expected = draft_features(probs, impl="torch")
    assert torch.equal(found[:, :10], expected[:, :10])
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kind", ["ties", "uniform", "certain", "late", "early"])
def test_distributions_at_the_ends(kind: str, device: torch.device) -> None:
    probs = distributions(2, 9000).sort(dim=-1).values.to(device)
    if kind == "early":
        probs = probs.flip(-1).contiguous()
    elif kind != "late":
        probs = torch.zeros_like(probs)
        probs[:, {"ties": slice(0, 9000, 900), "uniform": slice(None), "certain": 8999}[kind]] = 1
        probs /= probs.sum(dim=-1, keepdim=True)
    found = draft_features(probs, impl="triton")
    expected = draft_features(probs, impl="torch")
    assert torch.equal(found[:, :10], expected[:, :10])
    # 9000 equal terms are summed in a different order.
    torch.testing.assert_close(found[:, 10], expected[:, 10], atol=1e-4, rtol=0)


@pytest.mark.parametrize("num_top", [1, 7, 32])
def test_any_number_of_probabilities(num_top: int, device: torch.device) -> None:
    probs = distributions(2, 40).to(device)
    found = draft_features(probs, num_top, impl="triton")
    torch.testing.assert_close(found, draft_features(probs, num_top, impl="torch"))


def test_strides_are_free_and_rows_may_be_missing(device: torch.device) -> None:
    wide = distributions(4, 50).to(device)
    every_other = wide[::2, :20]
    found = draft_features(every_other, impl="triton")
    torch.testing.assert_close(found, draft_features(every_other, impl="torch"))
    assert draft_features(wide[:0], impl="triton").shape == (0, 11)


def test_what_the_kernel_cannot_read_is_refused(device: torch.device) -> None:
    probs = distributions(2, 20).to(device)
    with pytest.raises(ValueError, match="num_top=33"):
        draft_features(probs, 33)
    with pytest.raises(TypeError, match="draft_probs is torch"):
        draft_features(probs.double(), impl="triton")
    with pytest.raises(ValueError, match="draft_probs has strides"):
        draft_features(probs.T.contiguous().T, impl="triton")
