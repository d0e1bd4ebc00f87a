"""Argmax and distributions of arbitrary scores, and both ways to draw without replacement."""

from __future__ import annotations

import pytest
import torch

from hf_spec.engine.decode.sampling import argmaxes, distribution, draw, exponential_race
from hf_spec.evaluation.lossless.distribution import chi_square

DRAWS = 20_000
PROBS = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05])


def p_value(expected: torch.Tensor, counts: torch.Tensor) -> float:
    cells = zip((expected.flatten() * DRAWS).tolist(), counts.tolist(), strict=True)
    return chi_square(cells).p_value


def pairs(drawn: torch.Tensor) -> torch.Tensor:
    """Count how often each ordered pair was drawn."""
    return torch.bincount(drawn[:, 0] * len(PROBS) + drawn[:, 1], minlength=len(PROBS) ** 2)


def test_clocks_ring_in_the_order_of_draws_without_replacement() -> None:
    torch.manual_seed(0)
    counts = pairs(exponential_race(PROBS.expand(DRAWS, -1), 2))
    expected = PROBS[:, None] * PROBS / (1 - PROBS)[:, None]
    expected.fill_diagonal_(0)
    assert counts[expected.flatten() == 0].sum() == 0
    assert p_value(expected, counts) > 1e-6
    # The reversed order has a different distribution.
    assert p_value(expected.T, counts) < 1e-9


def test_on_the_host_it_is_multinomial() -> None:
    lines = torch.rand(3, 7)
    torch.manual_seed(1)
    drawn = draw(lines, 2)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.multinomial(lines, 2))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_argmaxes_are_those_of_torch(dtype: torch.dtype) -> None:
    """The first of equal logits wins (half precision has many ties); NaN is the largest."""
    logits = torch.randn(40, 5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits[3], logits[4], logits[5, 70], logits[6, [9, 90]] = 0, -INF, INF, NAN
    # Differences below the resolution of float32.
    logits[7, :3] = torch.tensor([9, 9 + 1e-12, 9], dtype=torch.float64).to(dtype)
    assert argmaxes(logits) == logits.argmax(dim=-1).tolist()


def test_the_distribution_of_finite_scores_is_their_softmax() -> None:
    scores = torch.tensor([[1.0, 2.0, -INF], [0.0, -INF, -INF]])
    assert torch.equal(distribution(scores), scores.softmax(dim=-1))


def test_where_the_softmax_is_not_a_number_what_argmax_takes_is_certain() -> None:
    lines = [[0.0, INF, INF], [-INF, -INF, -INF], [0.0, 1.0, NAN], [INF, 0.0, NAN], [1.0, 1.0, 1.0]]
    scores = torch.tensor(lines)
    probs = distribution(scores)
    certain = torch.nn.functional.one_hot(scores[:4].argmax(dim=-1), 3).float()
    assert torch.equal(probs[:4], certain)
    assert torch.equal(probs[4], scores[4].softmax(dim=-1))
    assert scores[1].tolist() == lines[1]
