"""Loss budget: how much time a generation may spend on drafts that do not pay.

Only drafting shows whether drafts pay. The budget bounds that cost in plain steps (steps without a
draft, one token per row): a generation of T tokens loses at most `INITIAL_STEPS` +
`STEPS_PER_TOKEN` x T. A draft whose expected gain is several times its cost may exceed the budget;
each failure lowers the next expectation. Gains are credited, so drafts that pay are never blocked.
"""

from __future__ import annotations

INITIAL_STEPS = 1.0
STEPS_PER_TOKEN = 0.01
# Share of a draft's expected gain that it may lose on top of the budget.
GAIN_SHARE = 0.25


class LossBudget:
    """Plain steps that the drafts of one generation may still lose.

    Attributes:
        steps: the remaining budget; negative after a loss that exceeded it.
    """

    def __init__(self) -> None:
        self.steps = INITIAL_STEPS

    def allows(self, tokens: float, seconds: float, plain_seconds: float) -> bool:
        """Return True if the expected loss of this round fits the remaining budget.

        Args:
            tokens: expected tokens per row, the bonus token included.
            seconds: expected seconds of the round.
            plain_seconds: seconds of a step without a draft, which yields one token per row.
        """
        # Configured timings may be 0.
        spent = seconds / max(plain_seconds, 1e-9)
        return spent - 1.0 <= max(self.steps, 0.0) + GAIN_SHARE * max(tokens - spent, 0.0)

    def record_round(self, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Add the tokens per row that a round gained and subtract its time."""
        self.steps += tokens * (1.0 + STEPS_PER_TOKEN) - seconds / max(plain_seconds, 1e-9)
