"""Exploration: retries of a drafter that is not expected to pay off."""

from __future__ import annotations

import itertools
import math

import pytest

from hf_spec.drafting.cost_model.exploration import (
    MOST_IDLE,
    PATIENCE,
    WAIT_PER_STEP,
    Backoff,
    Exploration,
)


def trials(cost: float, rounds: int) -> list[int]:
    """Return the rounds in which a drafter that never pays off is tried."""
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


class TestBackoff:
    def test_the_wait_doubles_until_drafting_takes_a_small_share_of_the_time(self) -> None:
        backoff, drafted = Backoff(), []
        for number in range(400):
            if backoff.is_due():
                drafted.append(number)
                backoff.record(False, draft_seconds=0.1, round_seconds=1.0)
        waits = [later - earlier - 1 for earlier, later in itertools.pairwise(drafted)]
        assert waits[: PATIENCE - 1] == [0] * (PATIENCE - 1)
        assert waits[PATIENCE - 1 :][:5] == [1, 2, 4, 8, 16]
        # One draft, 0.1 of a round, in every 21 rounds.
        assert set(waits[PATIENCE + 4 :]) == {20}

    def test_the_next_generation_waits_sooner(self) -> None:
        """If no draft was sent, it waits sooner, but still starts with one draft."""
        for idle, first in ((0, PATIENCE), (4, PATIENCE - 2), (MOST_IDLE, 1), (10**6, 1)):
            backoff, drafts = Backoff.after(idle), 0
            while backoff.is_due():
                drafts += 1
                backoff.record(False, 0.1, 1.0)
            assert drafts == first

    def test_no_wait_where_drafting_takes_little_time(self) -> None:
        backoff = Backoff()
        for _ in range(50):
            assert backoff.is_due()
            backoff.record(False, draft_seconds=0.004, round_seconds=1.0)

    def test_a_draft_that_is_sent_ends_the_wait(self) -> None:
        backoff = Backoff()
        for _ in range(20):
            backoff.record(False, 0.1, 1.0)
        assert not backoff.is_due()
        backoff.record(True, 0.1, 1.0)
        assert backoff.is_due()
        backoff.record(False, 0.1, 1.0)
        assert backoff.is_due()
