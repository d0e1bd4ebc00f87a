"""Recording of round times; device clocks are tested in `backend/device/test_clock.py`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from hf_spec.backend.device.capture import warm_ups
from hf_spec.backend.device.clock import Clock
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes
from hf_spec.drafting.cost_model.round_timer import RoundTimer


class Lagging(Clock):
    """Clock whose marks are values of `now`; marks up to `known` have passed."""

    now = known = 0.0

    def mark(self) -> float:
        return self.now

    def passed(self, mark: float) -> bool:
        return mark <= self.known

    def seconds(self, start: float, end: float) -> float:
        return end - start


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return a list that collects the arguments of `RoundTimes.learn`."""
    found: list[Any] = []
    monkeypatch.setattr(RoundTimes, "learn", lambda _, *told: found.append(told))
    return found


def rounds(clock: Clock, times: RoundTimes | None) -> RoundTimer:
    costs = Costs(lambda nodes: 2.0 * nodes, {"draft": lambda depth: 5.0 * depth})
    return RoundTimer(clock, costs, times)


def one_round(timed: RoundTimer, clock: Lagging) -> float:
    """Draft for 3 s in two forward passes, verify for 4 s, and return the reported draft time."""
    drafter: Any = SimpleNamespace(forwards=0)
    timed.begin()
    with timed.time_draft("draft", drafter, 2, 7):
        clock.now += 3
        drafter.forwards += 2
    draft_seconds = timed.draft_seconds()
    timed.mark_sent(6)
    clock.now += 4
    timed.mark_verified()
    return draft_seconds


def test_a_round_is_learned_from_when_its_time_is_known(learned: list[Any]) -> None:
    clock = Lagging()
    timed = rounds(clock, RoundTimes())
    # The draft time is not available yet, so the expected cost is used.
    assert one_round(timed, clock) == 10.0
    clock.known = clock.now
    assert one_round(timed, clock) == 10.0
    # The first round is the prefill.
    assert learned == []
    clock.known = clock.now
    timed.begin()
    assert learned == [(6, 4.0, {"draft": (2, 7, 3.0)})]


def test_on_the_host_it_is_known_at_once(learned: list[Any]) -> None:
    clock = Lagging()
    clock.known = float("inf")
    timed = rounds(clock, RoundTimes())
    assert one_round(timed, clock) == 3.0
    one_round(timed, clock)
    assert learned == [(6, 4.0, {"draft": (2, 7, 3.0)})]
    timed.restart()
    assert timed.is_first
    one_round(timed, clock)
    assert len(learned) == 1


def test_steps_around_a_capture_are_not_timed(
    learned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Lagging()
    clock.known = float("inf")
    monkeypatch.setattr(warm_ups, "count", 0)
    timed = rounds(clock, RoundTimes())
    one_round(timed, clock)
    assert not timed.was_timed, "it runs the prompt"
    for in_draft, in_step in ((1, 0), (0, 1), (1, 1), (0, 0)):
        drafter: Any = SimpleNamespace(forwards=0)
        timed.begin()
        with timed.time_draft("draft", drafter, 1, 1):
            warm_ups.count += in_draft
            drafter.forwards += 1
        timed.mark_sent(2)
        clock.now += 4
        warm_ups.count += in_step
        timed.mark_verified()
        assert timed.was_timed == (not in_step)
    draft = {"draft": (1, 1, 0.0)}
    assert learned == [(2, 4.0, {}), (2, None, draft), (2, None, {}), (2, 4.0, draft)]


def test_given_costs_count_as_they_are(learned: list[Any]) -> None:
    clock = Lagging()
    clock.known = float("inf")
    timed = rounds(clock, None)
    assert one_round(timed, clock) == 0.0
    one_round(timed, clock)
    assert learned == []
