"""Draws without replacement: the same distribution by both ways."""

from __future__ import annotations

import torch

from hf_spec.bench.distribution import chi_square
from hf_spec.decoding.drawing import draw, first_to_ring

DRAWS = 20_000
PROBS = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.05])


def p_value(expected: torch.Tensor, counts: torch.Tensor) -> float:
    cells = zip((expected.flatten() * DRAWS).tolist(), counts.tolist(), strict=True)
    return chi_square(cells).p_value


def pairs(drawn: torch.Tensor) -> torch.Tensor:
    """How often each ordered pair came."""
    return torch.bincount(drawn[:, 0] * len(PROBS) + drawn[:, 1], minlength=len(PROBS) ** 2)


def test_clocks_ring_in_the_order_of_draws_without_replacement() -> None:
    torch.manual_seed(0)
    counts = pairs(first_to_ring(PROBS.expand(DRAWS, -1), 2))
    expected = PROBS[:, None] * PROBS / (1 - PROBS)[:, None]
    expected.fill_diagonal_(0)
    assert counts[expected.flatten() == 0].sum() == 0
    assert p_value(expected, counts) > 1e-6
    # The order the other way round is another distribution.
    assert p_value(expected.T, counts) < 1e-9


def test_on_the_host_it_is_multinomial() -> None:
    lines = torch.rand(3, 7)
    torch.manual_seed(1)
    drawn = draw(lines, 2)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.multinomial(lines, 2))
