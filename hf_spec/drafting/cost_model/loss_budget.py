"""What drafts may cost beyond what they bring, so that no text is slower than it is without them.

Whether drafts pay is found out by drafting. What this may lose is bounded, in steps without drafts
(plain steps, one token per row): a generation of T tokens loses at most `FIRST` + `SHARE` x T on
drafts of which little is known. Drafts that are expected to bring several times what they cost may
be tried beyond that; each one that fails is expected to bring less the next time. What drafts
gained counts, so that those that pay are never kept from it.
"""

from __future__ import annotations

FIRST = 1.0
SHARE = 0.01
# How much of what drafts are expected to gain may be lost on them.
TRUST = 0.25


class LossBudget:
    """The plain steps that drafts of one generation may still lose.

    Attributes:
        steps: so many; gains add to them.
    """

    def __init__(self) -> None:
        self.steps = FIRST

    def allows(self, tokens: float, seconds: float, plain_seconds: float) -> bool:
        """Whether a round may be made that takes so long and is expected to gain so much.

        `tokens` are per row; a step without drafts gains one in `plain_seconds`.
        """
        # Given timings may hold 0.
        spent = seconds / max(plain_seconds, 1e-9)
        return spent - 1.0 <= max(self.steps, 0.0) + TRUST * max(tokens - spent, 0.0)

    def settle(self, tokens: float, seconds: float, plain_seconds: float) -> None:
        """Count a round that gained so many tokens per row and took so long."""
        self.steps += tokens * (1.0 + SHARE) - seconds / max(plain_seconds, 1e-9)
