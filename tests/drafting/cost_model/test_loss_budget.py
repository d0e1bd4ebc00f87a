"""What drafts lose is bounded, and what they gained may be spent."""

from __future__ import annotations

import pytest

from hf_spec.drafting.cost_model.loss_budget import FIRST, SHARE, TRUST, LossBudget


def most(allowance: LossBudget, tokens: float = 0.0) -> float:
    """How long a round may take, in plain steps."""
    return max(n / 100 for n in range(10_000) if allowance.allows(tokens, n / 100, 1.0))


def test_a_round_may_cost_what_is_left_on_top_of_a_plain_step() -> None:
    allowance = LossBudget()
    assert most(allowance) == pytest.approx(1 + FIRST, abs=0.011)
    allowance.settle(1.0, 0.06, 0.04)
    assert allowance.steps == pytest.approx(FIRST + SHARE - 0.5)
    allowance.settle(1.0, 0.4, 0.04)
    assert most(allowance) == 1.0


def test_plain_steps_bring_it_back_slowly() -> None:
    allowance = LossBudget()
    allowance.settle(1.0, 3.0, 1.0)
    for _ in range(int((2 - FIRST) / SHARE)):
        assert not allowance.allows(0.0, 1.0 + 2 * SHARE, 1.0)
        allowance.settle(1.0, 1.0, 1.0)


def test_gains_count() -> None:
    allowance = LossBudget()
    allowance.settle(3.0, 1.5, 1.0)
    assert allowance.steps == pytest.approx(FIRST + 1.5 + 3 * SHARE)


def test_drafts_that_are_worth_several_times_their_cost_may_be_tried() -> None:
    allowance = LossBudget()
    allowance.settle(1.0, 9.0, 1.0)
    assert allowance.allows(1.5 + 0.5 / TRUST, 1.5, 1.0)
    assert not allowance.allows(1.4 + 0.5 / TRUST, 1.5, 1.0)
    assert not allowance.allows(1.6, 1.5, 1.0)


def test_the_worst_that_can_happen_stays_within_the_bound() -> None:
    """Rounds that take all they may and bring nothing."""
    allowance, lost = LossBudget(), 0.0
    for _ in range(500):
        spent = 1.0 + max(allowance.steps, 0.0)
        assert allowance.allows(1.0, spent, 1.0)
        allowance.settle(1.0, spent, 1.0)
        lost += spent - 1.0
    assert lost == pytest.approx(FIRST + SHARE * 499)


def test_steps_that_cost_nothing() -> None:
    allowance = LossBudget()
    allowance.settle(1.0, 0.0, 0.0)
    assert allowance.allows(1.0, 0.0, 0.0)
