"""When a drafter is tried again although it is not expected to pay."""

from __future__ import annotations

import math

import pytest

from hf_spec.drafting.cost_model.exploration import WAIT_PER_STEP, Exploration


def trials(cost: float, rounds: int) -> list[int]:
    """The rounds in which a drafter that never pays is tried."""
    exploration, tried = Exploration(), []
    for number in range(rounds):
        due = exploration.is_due(cost)
        exploration.record(chosen=False, tried=due)
        if due:
            tried.append(number)
    return tried


@pytest.mark.parametrize("cost", [0.05, 0.25, 1.0])
def test_waits_are_in_proportion_to_the_cost_and_double(cost: float) -> None:
    rounds = trials(cost, 2000)
    waits = [after - before - 1 for before, after in zip([-1, *rounds], rounds, strict=False)]
    assert waits == [math.ceil(WAIT_PER_STEP * cost * 2**n) for n in range(len(waits))]


@pytest.mark.parametrize("cost", [0.05, 0.1, 0.5, 2.0])
def test_what_trials_lose_grows_with_the_logarithm_of_the_rounds(cost: float) -> None:
    for rounds in (128, 1024, 8192):
        lost = cost * len(trials(cost, rounds))
        assert lost <= cost * (2 + math.log2(1 + rounds / (WAIT_PER_STEP * cost)))
        assert lost <= 0.04 * rounds


def test_a_drafter_that_pays_again_is_soon_tried_again_later() -> None:
    exploration = Exploration()
    for _ in range(200):
        exploration.record(chosen=False, tried=exploration.is_due(0.5))
    assert exploration.trials > 2
    exploration.record(chosen=True, tried=False)
    assert (exploration.idle, exploration.trials) == (0, 0)


def test_a_free_trial_is_always_due() -> None:
    exploration = Exploration(trials=5)
    assert exploration.is_due(0.0)
