"""Exploration: when a drafter runs although it is not expected to pay.

Only drafting shows whether drafts pay. A drafter that the cost model does not choose is therefore
tried again: after a wait in proportion to the cost of the trial, which doubles with every trial
that did not make the drafter pay. So N rounds have O(log N) trials. A trial is the cheapest draft.
The target's own next token shows whether its first level is right, even if no draft node is sent.
A drafter must first read what was generated since its last draft, which in batches may take most
of the time of a trial; one that takes too much of the rest of the answer is left out.

Drafters without a model run in every round. At high loads, where nothing that they draft is sent,
even their time on the host counts: a `Backoff` lets rounds pass without them.
"""

from __future__ import annotations

from dataclasses import dataclass

# Rounds before the first trial, per step of the target that a trial costs.
WAIT_PER_STEP = 32.0
# Rounds that must be left after a trial, per step of the target that it costs.
REST_PER_STEP = 16.0
# Longest wait, as a power of two times the first one.
MOST_DOUBLINGS = 10
# Share of a round that unused drafts without a model may take, number of such drafts before the
# first wait, and number after which the wait no longer grows.
HOST_SHARE = 0.005
PATIENCE, MOST_IDLE = 4, 9


@dataclass
class Exploration:
    """Idle rounds and trials of one drafter in one row.

    Attributes:
        idle: rounds since the last draft.
        trials: trials since the cost model last chose the drafter.
        cost: cost of a trial when the drafter became idle, in steps of the target. It grows while
            the drafter does not read the text; a wait that grew with it might never end.
    """

    idle: int = 0
    trials: int = 0
    cost: float = 0.0

    def restart(self) -> None:
        """Begin another text, on which the drafter may be better: shorten the wait."""
        self.trials //= 2
        # The drafter has not read this text.
        self.cost = 0.0

    def is_due(self, cost: float) -> bool:
        """Return True if a trial that costs `cost` steps of the target is due in this round."""
        if self.idle == 0 or not self.cost:
            self.cost = cost
        return self.idle >= WAIT_PER_STEP * self.cost * 2 ** min(self.trials, MOST_DOUBLINGS)

    def record(self, chosen: bool, tried: bool) -> None:
        """Record a round in which the cost model chose the drafter, or tried it, or neither."""
        self.trials = 0 if chosen else self.trials + tried
        self.idle = 0 if chosen or tried else self.idle + 1


@dataclass
class Backoff:
    """Rounds in which drafters without a model do not run, because nothing of theirs was sent.

    The wait doubles with every such draft, until drafting takes `HOST_SHARE` of the time.

    Attributes:
        idle: drafts in a row of which no node was sent.
        wait: rounds before the next draft.
    """

    idle: int = 0
    wait: int = 0

    @classmethod
    def after(cls, idle: int) -> Backoff:
        """Return the start of a generation: half as patient, since other texts may repeat more.

        Before it, `idle` drafts in a row were not sent.
        """
        return cls(min(idle, MOST_IDLE) // 2)

    def is_due(self) -> bool:
        """Return True if they draft in this round; called once per round."""
        self.wait -= 1
        return self.wait < 0

    def record(self, sent: bool, draft_seconds: float, round_seconds: float) -> None:
        """Record a draft, its time on the host, and that of a round."""
        self.idle = 0 if sent else self.idle + 1
        longest = draft_seconds / (HOST_SHARE * max(round_seconds, 1e-9))
        doublings = min(self.idle, MOST_IDLE) - PATIENCE
        self.wait = int(min(longest, 2**doublings)) if doublings >= 0 else 0
