"""When rounds are recorded; devices are tested in `backend/device/test_clock.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_spec.backend.device.clock import Clock
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes
from hf_spec.drafting.cost_model.round_timer import RoundTimer
from hf_spec.drafting.cost_model.selection import LossBudget


class Lagging(Clock):
    """Marks are moments of `now`, and have passed up to `known`."""

    now = known = 0.0

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark <= self.known

    def seconds(self, start: float, end: float) -> float:
        return end - start


class RecordingBudget(LossBudget):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[float, float, float]] = []

    def record_round(self, *round_: float) -> None:
        self.recorded.append(round_)  # type: ignore[arg-type]


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Fills with what the times are told."""
    found: list[Any] = []
    monkeypatch.setattr(RoundTimes, "learn", lambda _, *told: found.append(told))
    return found


def rounds(clock: Clock, budget: LossBudget, times: RoundTimes | None) -> RoundTimer:
    costs = Costs(lambda nodes: 2.0 * nodes, {"draft": lambda depth: 5.0 * depth})
    return RoundTimer(clock, costs, times, budget)


def one_round(timed: RoundTimer, clock: Lagging) -> float:
    """Drafts for 3 seconds with two forwards, and verifies for 4; what was known of the drafts."""
    drafter = SimpleNamespace(forwards=0)
    timed.begin()
    with timed.time_draft("draft", drafter, 2):
        clock.now += 3
        drafter.forwards += 2
    draft_seconds = timed.draft_seconds()
    timed.mark_sent(6, 1.0)
    clock.now += 4
    timed.mark_verified(2, 5)
    return draft_seconds


def test_a_round_is_learned_from_when_its_time_is_known(learned: list[Any]) -> None:
    clock, budget = Lagging(), RecordingBudget()
    timed = rounds(clock, budget, RoundTimes())
    # The draft is expected to take as long as such drafts do.
    assert one_round(timed, clock) == 10.0
    assert (learned, budget.recorded) == ([], [])
    clock.known = clock.now
    assert one_round(timed, clock) == 10.0
    # The first round runs the prompt.
    assert learned == []
    assert budget.recorded == [(2.5, 2.0 * 6 + 3, 2.0 * 2)]
    clock.known = clock.now
    timed.begin()
    assert learned == [(6, 4.0, {"draft": (2, 3.0)})]


def test_on_the_host_it_is_known_at_once(learned: list[Any]) -> None:
    clock, budget = Lagging(), RecordingBudget()
    clock.known = float("inf")
    timed = rounds(clock, budget, RoundTimes())
    assert one_round(timed, clock) == 3.0
    one_round(timed, clock)
    assert learned == [(6, 4.0, {"draft": (2, 3.0)})]
    assert len(budget.recorded) == 2
    timed.restart()
    assert timed.is_first
    one_round(timed, clock)
    assert len(learned) == 1


def test_given_costs_count_as_they_are(learned: list[Any]) -> None:
    clock, budget = Lagging(), RecordingBudget()
    clock.known = float("inf")
    timed = rounds(clock, budget, None)
    assert one_round(timed, clock) == 0.0
    one_round(timed, clock)
    assert learned == []
    assert budget.recorded == [(2.5, 2.0 * 6 + 1.0, 2.0 * 2)] * 2
