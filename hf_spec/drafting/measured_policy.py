"""The length policy "measured": draft on where the next level is worth its time.

What a level is worth is learned here, per row; what it costs is set from outside before each round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hf_spec.drafting.length_policy import MEASURED, DraftedToken, LengthPolicy, register_policy
from hf_spec.drafting.sources import (
    EXPECTATION_WEIGHT,
    LEVEL_EXPECTATION,
    LEVEL_WEIGHT,
    PROBABILITY_KINDS,
    Shares,
)


def free(level: int) -> float:
    """The price of another level where none is known."""
    return 0.0


class MeasuredPolicy(LengthPolicy):
    """Drafts on where another level is worth its time.

    A level is worth the probability that the target goes there. The drafter says how likely its
    newest level is; how often levels of that likelihood came true corrects it, and how often one
    level followed another leads on to the next. `price` says, by the levels there are, what another
    one costs, in tokens that its time would bring elsewhere.
    """

    def __init__(self, max_draft_tokens: int):
        super().__init__(max_draft_tokens)
        self.price: Callable[[int], float] = free

    def start(self, num_rows: int) -> None:
        """Nothing is known of any row."""
        self._came_true = [self._new_shares() for _ in range(num_rows)]
        self._went_on = [Shares(lambda _: LEVEL_EXPECTATION, LEVEL_WEIGHT) for _ in range(num_rows)]
        self._reach: list[list[float]] = [[] for _ in range(num_rows)]

    def restart(self, row: int) -> None:
        """Nothing is known of one row."""
        self._came_true[row] = self._new_shares()
        self._went_on[row] = Shares(lambda _: LEVEL_EXPECTATION, LEVEL_WEIGHT)

    def limit(self, row: int) -> int:
        """The most; asked at the beginning of a round."""
        self._reach[row] = []
        return self.max_draft_tokens

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each row's next level is worth its price."""
        worth = []
        for token in newest:
            self._reach[token.row].append(token.reach)
            likely = self._came_true[token.row].share(_tenth(token.reach))
            likely *= self._went_on[token.row].share(None)
            worth.append(likely > self.price(len(self._reach[token.row])))
        return worth

    def learn(self, row: int, drafted: int, reached: int, known: int) -> None:
        """Add the outcome of a round: levels drafted, levels gone through, tokens gained."""
        for level, reach in enumerate(self._reach[row], start=1):
            if level > known and reached == known:
                break
            self._came_true[row].count(_tenth(reach), level <= reached)
        for level in range(1, min(drafted, known, reached + 1) + 1):
            self._went_on[row].count(None, level <= reached)

    @staticmethod
    def _new_shares() -> Shares:
        return Shares(lambda kind: (kind + 0.5) / PROBABILITY_KINDS, EXPECTATION_WEIGHT)


def _tenth(probability: float) -> int:
    # Processors may leave nothing possible: NaN is no likelihood.
    if not probability > 0:
        return 0
    return min(int(probability * PROBABILITY_KINDS), PROBABILITY_KINDS - 1)


register_policy(MEASURED, lambda options, _: MeasuredPolicy(options.max_draft_tokens))
