"""What the rounds of a generation took, and what is learned from it.

A round is timed in two parts, its drafts and the target's forward, by marks that may be read later
than they are set (see `hf_spec.backend.device.clock`). So a round is learned from as soon as its
times are known, at the latest when the next one has been judged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from hf_spec.backend.device.clock import Clock
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes
from hf_spec.drafting.cost_model.loss_budget import LossBudget


class Counts(Protocol):
    """What counts its forwards."""

    @property
    def forwards(self) -> int: ...  # noqa: D102


@dataclass(frozen=True)
class TimedDraft:
    """What a drafter did in a round: forwards, levels asked for, and the marks around it."""

    forwards: int
    depth: int
    start: Any
    end: Any


@dataclass(frozen=True)
class _Round:
    """A round whose times are not known yet.

    Attributes:
        size: nodes that were sent.
        sent, judged: marks around the target's forward and the verdict.
        drafts: what the drafters did.
        known: those that have drafted before; None of rounds that tell nothing of the others.
        expected: seconds that the drafts were to take.
        rows, gained: how many, and the tokens of all of them.
    """

    size: float
    sent: Any
    judged: Any
    drafts: Mapping[str, TimedDraft]
    known: frozenset[str] | None
    expected: float
    rows: int
    gained: int


class RoundClock:
    """Times rounds, and tells `times` and `allowance` of them.

    Without `times` nothing is learned, and drafts count for what they were expected to take.

    Attributes:
        is_first: whether the next forward runs a prompt, which tells nothing of the others.
        drafts: what the drafters did in the newest round, by name.
    """

    def __init__(self, clock: Clock, costs: Costs, times: RoundTimes | None, allowance: LossBudget):
        self._clock = clock
        self._costs = costs
        self._times = times
        self._allowance = allowance
        self._round: _Round | None = None
        self.restart()

    def restart(self) -> None:
        """A prompt is run next: by the target now, by drafters when they first draft."""
        self.is_first = True
        self.drafts: dict[str, TimedDraft] = {}
        self._has_drafted: set[str] = set()

    def begin(self) -> None:
        """A round begins."""
        self._read()
        self.drafts = {}

    @contextmanager
    def drafting(self, name: str, drafter: Counts, depth: int) -> Iterator[None]:
        """A drafter works in the block, asked for so many levels."""
        before, start = drafter.forwards, self._clock.mark()
        yield
        count = drafter.forwards - before
        self.drafts[name] = TimedDraft(count, depth, start, self._clock.mark())

    def draft_seconds(self) -> float:
        """Seconds that the drafts of the round took, or may take where nobody knows yet."""
        if self._times is None:
            return 0.0
        return sum(
            self._clock.seconds(one.start, one.end)
            if self._clock.passed(one.end)
            else self._costs.draft[name](one.depth)
            for name, one in self.drafts.items()
            if one.forwards
        )

    def sent(self, size: float, expected: float) -> None:
        """So many nodes go to the target; the drafts were to take so many seconds."""
        self._size, self._expected, self._sent = size, expected, self._clock.mark()

    def judged(self, rows: int, gained: int) -> None:
        """So many rows have so many tokens more, which the host knows."""
        # The round before has passed by now.
        self._read()
        known = None if self.is_first else frozenset(self._has_drafted)
        marks = self._sent, self._clock.mark()
        self._round = _Round(self._size, *marks, self.drafts, known, self._expected, rows, gained)
        self.is_first = False
        self._has_drafted |= {name for name, one in self.drafts.items() if one.forwards}
        self._read()

    def _read(self) -> None:
        """Learn from the newest round, if the device has come that far."""
        one = self._round
        if one is None or not self._clock.passed(one.judged):
            return
        self._round = None
        drafts = {
            name: (draft.forwards, self._clock.seconds(draft.start, draft.end))
            for name, draft in one.drafts.items()
        }
        if self._times is not None and one.known is not None:
            timed = {name: spent for name, spent in drafts.items() if name in one.known}
            self._times.learn(one.size, self._clock.seconds(one.sent, one.judged), timed)
        if one.rows:
            drafting = one.expected
            if self._times is not None:
                drafting = sum(seconds for count, seconds in drafts.values() if count)
            spent = self._costs.verify(one.size) + drafting
            self._allowance.settle(one.gained / one.rows, spent, self._costs.verify(one.rows))
