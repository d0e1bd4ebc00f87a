"""Timing of rounds without synchronizing with the device.

Start and end of the drafts, and of the target's forward pass with verification, are marks that may
be read later (`hf_spec.backend.device.clock`). A round is recorded when its marks have passed,
at the latest when the next round was verified.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from hf_spec.backend.device.clock import Clock
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes
from hf_spec.drafting.cost_model.selection import LossBudget
from hf_spec.engine.decode.drafter import Drafter


@dataclass(frozen=True)
class TimedDraft:
    """A drafter's work in one round: forward passes, requested depth, start and end marks."""

    forwards: int
    depth: int
    start: Any
    end: Any


@dataclass
class TimedRound:
    """A round until it is recorded.

    Attributes:
        size: nodes that the target ran.
        expected_seconds: expected drafting time.
        sent, verified: marks around the target's forward pass and verification.
        timed_drafters: drafters whose time is recorded; None if the whole round is not timed.
        rows, tokens: number of rows, and of tokens that they gained together.
    """

    drafts: dict[str, TimedDraft] = field(default_factory=dict)
    size: float = 0.0
    expected_seconds: float = 0.0
    sent: Any = None
    verified: Any = None
    timed_drafters: frozenset[str] | None = None
    rows: int = 0
    tokens: int = 0


class RoundTimer:
    """Times rounds and records them in `times` and `budget`.

    Without `times`, nothing is learned and drafts are charged to the budget at their expected cost.
    The forward pass of a prompt (`is_first`) is not timed.
    """

    def __init__(self, clock: Clock, costs: Costs, times: RoundTimes | None, budget: LossBudget):
        self._clock = clock
        self._costs = costs
        self._times = times
        self._budget = budget
        self._pending: TimedRound | None = None
        self.restart()

    def restart(self) -> None:
        """Do not time the next round, nor the next draft of each drafter: they run a prompt."""
        self.is_first = True
        self.round = TimedRound()
        self._has_drafted: set[str] = set()

    def begin(self) -> None:
        """Begin a round."""
        self._record_pending()
        self.round = TimedRound()

    @contextmanager
    def time_draft(self, name: str, drafter: Drafter, depth: int) -> Iterator[None]:
        """Time the block, in which `drafter` drafts `depth` levels."""
        before, start = drafter.forwards, self._clock.mark()
        yield
        count = drafter.forwards - before
        self.round.drafts[name] = TimedDraft(count, depth, start, self._clock.mark())

    def draft_seconds(self) -> float:
        """Return the drafting time of the round: measured, or expected until its end has passed."""
        if self._times is None:
            return 0.0
        return sum(
            self._clock.seconds(draft.start, draft.end)
            if self._clock.passed(draft.end)
            else self._costs.draft[name](draft.depth)
            for name, draft in self.round.drafts.items()
            if draft.forwards
        )

    def mark_sent(self, size: float, expected_seconds: float) -> None:
        """Mark the start of the target's forward pass over `size` nodes."""
        self.round.size, self.round.expected_seconds = size, expected_seconds
        self.round.sent = self._clock.mark()

    def mark_verified(self, rows: int, tokens: int) -> None:
        """Mark the end of verification: `rows` rows gained `tokens` tokens together."""
        # The marks of the previous round have passed by now.
        self._record_pending()
        done = self._pending = self.round
        done.rows, done.tokens, done.verified = rows, tokens, self._clock.mark()
        done.timed_drafters = None if self.is_first else frozenset(self._has_drafted)
        self.is_first = False
        self._has_drafted |= {name for name, draft in done.drafts.items() if draft.forwards}
        self._record_pending()

    def _record_pending(self) -> None:
        done = self._pending
        if done is None or not self._clock.passed(done.verified):
            return
        self._pending = None
        drafts = {
            name: (draft.forwards, self._clock.seconds(draft.start, draft.end))
            for name, draft in done.drafts.items()
        }
        if self._times is not None and done.timed_drafters is not None:
            timed = {name: drafts[name] for name in drafts if name in done.timed_drafters}
            self._times.learn(done.size, self._clock.seconds(done.sent, done.verified), timed)
        if done.rows:
            drafting = done.expected_seconds
            if self._times is not None:
                drafting = sum(seconds for count, seconds in drafts.values() if count)
            seconds = self._costs.verify(done.size) + drafting
            plain_seconds = self._costs.verify(done.rows)
            self._budget.record_round(done.tokens / done.rows, seconds, plain_seconds)
