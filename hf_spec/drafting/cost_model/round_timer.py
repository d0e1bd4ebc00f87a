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

from hf_spec.backend.device.capture import warm_ups
from hf_spec.backend.device.clock import Clock
from hf_spec.drafting.cost_model.cost_curves import Costs, RoundTimes
from hf_spec.engine.decode.drafter import Drafter


@dataclass(frozen=True)
class TimedDraft:
    """A drafter's work in one round.

    Attributes:
        forwards: forward passes.
        depth: requested depth.
        unread: tokens that its first pass reads besides drafting, see `DraftSource.unread`.
        start, end: marks around the work.
        settled: False if a step was run for the capture of a CUDA graph, see `WarmUps`.
    """

    forwards: int
    depth: int
    unread: int
    start: Any
    end: Any
    settled: bool = True


@dataclass
class TimedRound:
    """A round until it is recorded.

    Attributes:
        size: nodes that the target ran.
        sent, verified: marks around the target's forward pass and verification.
        warm_ups: the number of `WarmUps` when it was sent.
        settled: as of `TimedDraft`, for the target.
    """

    drafts: dict[str, TimedDraft] = field(default_factory=dict)
    size: float = 0.0
    sent: Any = None
    verified: Any = None
    warm_ups: int = 0
    settled: bool = False


class RoundTimer:
    """Times rounds and records them in `times`; without `times`, nothing is learned.

    Neither the target's forward pass of a prompt (`is_first`) nor anything around the capture of a
    CUDA graph is timed. `was_timed` is True if the target's pass of the last round was timed.
    """

    def __init__(self, clock: Clock, costs: Costs, times: RoundTimes | None):
        self._clock = clock
        self._costs = costs
        self._times = times
        self._pending: TimedRound | None = None
        self.restart()

    def restart(self) -> None:
        """Do not time the next round, which runs a prompt."""
        self.is_first, self.was_timed = True, False
        self.round = TimedRound()

    def begin(self) -> None:
        """Begin a round."""
        self._record_pending()
        self.round = TimedRound()

    @contextmanager
    def time_draft(self, name: str, drafter: Drafter, depth: int, unread: int) -> Iterator[None]:
        """Time the block, in which `drafter` drafts `depth` levels after `unread` new tokens."""
        before, known, start = drafter.forwards, warm_ups.count, self._clock.mark()
        yield
        count, settled, end = drafter.forwards - before, warm_ups.count == known, self._clock.mark()
        self.round.drafts[name] = TimedDraft(count, depth, unread, start, end, settled)

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

    def mark_sent(self, size: float) -> None:
        """Mark the start of the target's forward pass over `size` nodes."""
        self.round.size, self.round.sent = size, self._clock.mark()
        self.round.warm_ups = warm_ups.count

    def mark_verified(self) -> None:
        """Mark the end of verification."""
        # By now, the device has reached the marks of the previous round.
        self._record_pending()
        self.round.verified = self._clock.mark()
        settled = warm_ups.count == self.round.warm_ups
        self.round.settled, self.was_timed = settled, settled and not self.is_first
        if not self.is_first:
            self._pending = self.round
        self.is_first = False
        self._record_pending()

    def _record_pending(self) -> None:
        done = self._pending
        if self._times is None or done is None or not self._clock.passed(done.verified):
            return
        self._pending = None
        drafts = {
            name: (draft.forwards, draft.unread, self._clock.seconds(draft.start, draft.end))
            for name, draft in done.drafts.items()
            if draft.settled
        }
        seconds = self._clock.seconds(done.sent, done.verified) if done.settled else None
        self._times.learn(done.size, seconds, drafts)
