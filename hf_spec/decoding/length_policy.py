"""Length policies: when a drafter that drafts step by step should stop, per row.

==============  ================================================================================
`static`        always `max_draft_tokens`
`heuristic`     two more after a round in which every token was accepted, else one fewer
                (transformers' rule; the dynHeur baseline of Mamou et al. 2024, arXiv 2405.04304)
`confidence`    stop behind the first token whose draft probability is below the threshold; that
                token is still sent to the target (transformers' dynamic speculation)
==============  ================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hf_spec.errors import OptionError


@dataclass
class LengthPolicy:
    """Always drafts the maximum; the base of the other policies.

    Args:
        max_draft_tokens: most tokens (levels of a tree) drafted in a round.
        threshold: used by policies that look at probabilities.
    """

    max_draft_tokens: int
    threshold: float = 0.4

    def start(self, num_rows: int) -> None:
        """Begin a generation of `num_rows` rows."""

    def limit(self, row: int) -> int:
        """Most tokens that `row` may draft this round."""
        return self.max_draft_tokens

    def goes_on(self, row: int, position: int, probability: float) -> bool:
        """Whether `row` drafts on behind the token it has just drafted.

        Args:
            row: the sequence.
            position: 0 for the first token of the round.
            probability: the draft model's probability of the token.
        """
        return True

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Hear how many levels of the last draft of `row` were accepted."""


@dataclass
class HeuristicPolicy(LengthPolicy):
    """Two more after a fully accepted draft, one fewer otherwise, never fewer than one."""

    def start(self, num_rows: int) -> None:
        """Begin every row at the configured length."""
        self._limits = [self.max_draft_tokens] * num_rows

    def limit(self, row: int) -> int:
        """The row's current length."""
        return self._limits[row]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Adapt the length, unless nothing was drafted."""
        if drafted:
            step = 2 if accepted >= drafted else -1
            self._limits[row] = max(1, self._limits[row] + step)


@dataclass
class ConfidencePolicy(LengthPolicy):
    """Stop behind a token whose draft probability is below the threshold."""

    def goes_on(self, row: int, position: int, probability: float) -> bool:
        """Whether the last token was likely enough."""
        return probability >= self.threshold


POLICIES: dict[str, Callable[[int, float], LengthPolicy]] = {
    "static": LengthPolicy,
    "heuristic": HeuristicPolicy,
    "confidence": ConfidencePolicy,
}


def make_policy(name: str, max_draft_tokens: int, threshold: float) -> LengthPolicy:
    """The policy called `name`.

    Raises:
        OptionError: if there is none.
    """
    if not isinstance(name, str) or name not in POLICIES:
        raise OptionError(f"unknown length_policy {name!r}; known: {', '.join(sorted(POLICIES))}")
    return POLICIES[name](max_draft_tokens, threshold)
