"""The loss budget bounds losses; gains are credited to it."""

from __future__ import annotations

import pytest

from hf_spec.drafting.cost_model.loss_budget import (
    GAIN_SHARE,
    INITIAL_STEPS,
    STEPS_PER_TOKEN,
    LossBudget,
)


def most(budget: LossBudget, tokens: float = 0.0) -> float:
    """How long a round may take, in plain steps."""
    return max(n / 100 for n in range(10_000) if budget.allows(tokens, n / 100, 1.0))


def test_a_round_may_cost_what_is_left_on_top_of_a_plain_step() -> None:
    budget = LossBudget()
    assert most(budget) == pytest.approx(1 + INITIAL_STEPS, abs=0.011)
    budget.record_round(1.0, 0.06, 0.04)
    assert budget.steps == pytest.approx(INITIAL_STEPS + STEPS_PER_TOKEN - 0.5)
    budget.record_round(1.0, 0.4, 0.04)
    assert most(budget) == 1.0


def test_plain_steps_refill_it_slowly() -> None:
    budget = LossBudget()
    budget.record_round(1.0, 3.0, 1.0)
    for _ in range(int((2 - INITIAL_STEPS) / STEPS_PER_TOKEN)):
        assert not budget.allows(0.0, 1.0 + 2 * STEPS_PER_TOKEN, 1.0)
        budget.record_round(1.0, 1.0, 1.0)


def test_gains_count() -> None:
    budget = LossBudget()
    budget.record_round(3.0, 1.5, 1.0)
    assert budget.steps == pytest.approx(INITIAL_STEPS + 1.5 + 3 * STEPS_PER_TOKEN)


def test_drafts_with_an_expected_gain_of_several_times_their_cost_may_be_tried() -> None:
    budget = LossBudget()
    budget.record_round(1.0, 9.0, 1.0)
    assert budget.allows(1.5 + 0.5 / GAIN_SHARE, 1.5, 1.0)
    assert not budget.allows(1.4 + 0.5 / GAIN_SHARE, 1.5, 1.0)
    assert not budget.allows(1.6, 1.5, 1.0)


def test_the_worst_that_can_happen_stays_within_the_bound() -> None:
    """Rounds that use the whole budget and gain nothing."""
    budget, lost = LossBudget(), 0.0
    for _ in range(500):
        spent = 1.0 + max(budget.steps, 0.0)
        assert budget.allows(1.0, spent, 1.0)
        budget.record_round(1.0, spent, 1.0)
        lost += spent - 1.0
    assert lost == pytest.approx(INITIAL_STEPS + STEPS_PER_TOKEN * 499)


def test_steps_that_cost_nothing() -> None:
    budget = LossBudget()
    budget.record_round(1.0, 0.0, 0.0)
    assert budget.allows(1.0, 0.0, 0.0)
