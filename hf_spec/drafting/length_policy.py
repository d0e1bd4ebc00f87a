"""Length policies: when a drafter that drafts token by token stops, per row.

==============  ================================================================================
`static`        always `max_draft_tokens`
`heuristic`     two more after a round in which every token was accepted, else one fewer
                (transformers' rule; the dynHeur baseline of Mamou et al. 2024, arXiv 2405.04304)
`confidence`    stop after the first token whose draft probability is below the threshold
                (transformers' dynamic speculation)
`head`          stop after the first token for which the drafter's confidence head predicts an
                acceptance probability below the threshold (DSpark; `hf_spec.methods.block.markov`)
`measured`      stop where the next level does not pay (`hf_spec.drafting.cost_model`); on a GPU
                the depth follows from past rounds, before the draft
==============  ================================================================================

`register_policy` adds others, such as DISCO's classifier. A policy decides after every drafted
token, including the first; the token after which it stops is still verified. It sees only the draft
so far, past rounds and times, so residual rejection stays exact for sampled drafts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.cost_model.acceptance_stats import AcceptanceStats, probability_bin
from hf_spec.engine.forward.draft_tree import Verdict

# The policy of the cost model, and the policy that needs a confidence head.
MEASURED = "measured"
HEAD = "head"


@dataclass(frozen=True)
class DraftedToken:
    """The last draft token of a row; in a tree, the end of the most probable path.

    Attributes:
        position: 0 for the first generated token.
        probability: the draft model's probability after the token's own prefix.
        score: that of `LengthPolicy.score`, or the prediction of the drafter's confidence head.
        reach: the drafter's probability that the target's path runs through the nodes that the row
            would expand next, all of them together.
    """

    row: int
    token: int
    position: int
    probability: float
    score: float = 0.0
    reach: float = 1.0


@dataclass
class LengthPolicy:
    """Static length of `max_draft_tokens` tokens or tree levels; base class of the others.

    Attributes:
        plans_ahead: True if drafts that grow on the device do without `goes_on`, for which the host
            would wait after every pass: the cost model has chosen their depth before.
    """

    plans_ahead: ClassVar[bool] = False

    max_draft_tokens: int

    @property
    def longest(self) -> int:
        """Most tokens that any row may draft in any round."""
        return self.max_draft_tokens

    def start(self, num_rows: int) -> None:
        """Begin a generation of `num_rows` rows."""

    def restart(self, row: int) -> None:
        """Reset `row` for a new sequence."""

    def limit(self, row: int) -> int:
        """Return the most tokens that `row` may draft in this round; called once per round."""
        return self.max_draft_tokens

    def score(self, draft_probs: Tensor, positions: Sequence[int]) -> Tensor | None:
        """Return (M,) float32 scores of (M, V) distributions for `goes_on`; None if unused."""
        return None

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Return, for each growing row, whether it drafts another token after its newest one."""
        return [True] * len(newest)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Update the policy with the drafted and accepted levels of `row`."""

    def observe_all(self, verdict: Verdict) -> None:
        """Call `observe` for every row of a tree."""
        for row, accepted in enumerate(verdict.accepted):
            if verdict.tree.nodes(row):
                self.observe(row, verdict.tree.height(row), len(accepted))


@dataclass
class HeuristicPolicy(LengthPolicy):
    """Two more after a fully accepted draft, one fewer otherwise, at least one."""

    @property
    def longest(self) -> int:
        """Unbounded: it grows while all tokens are accepted."""
        return sys.maxsize

    def start(self, num_rows: int) -> None:
        """Start every row at the configured length."""
        self._limits = [self.max_draft_tokens] * num_rows

    def restart(self, row: int) -> None:
        """Reset one row to the configured length."""
        self._limits[row] = self.max_draft_tokens

    def limit(self, row: int) -> int:
        """Return the row's current length."""
        return self._limits[row]

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Update the length, unless nothing was drafted."""
        if drafted:
            step = 2 if accepted >= drafted else -1
            self._limits[row] = max(1, self._limits[row] + step)


@dataclass
class ConfidencePolicy(LengthPolicy):
    """Stop after a token whose draft probability is below the threshold."""

    threshold: float = 0.4

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Compare draft probabilities with the threshold."""
        return [token.probability >= self.threshold for token in newest]


@dataclass
class HeadPolicy(ConfidencePolicy):
    """The same for the acceptance probability that the drafter's confidence head predicts."""

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Compare acceptance probabilities with the threshold."""
        return [token.score >= self.threshold for token in newest]


class LevelCost(NamedTuple):
    """Cost of another level, in tokens: of the pass for all rows, and of a row's node."""

    shared: float = 0.0
    per_row: float = 0.0


class MeasuredPolicy(LengthPolicy):
    """Stop where the expected gain of another level is below its cost.

    All growing rows share the draft model's pass: it runs if their gains together exceed its cost.
    The gain of a row is the probability that the target's path reaches the level. It is estimated
    from the drafter's own probability for the last level, calibrated by the acceptance rate of such
    levels, times the rate at which one level follows another.

    Attributes:
        level_cost: number of drafted levels -> cost of another one at the current rate; None where
            it is unknown.
    """

    plans_ahead = True

    level_cost: Callable[[int], LevelCost] | None = None

    def start(self, num_rows: int) -> None:
        """Reset the rates of all rows."""
        # Acceptance of levels by their reach in tenths, and of any level after an accepted one.
        self._stats = [AcceptanceStats.from_prior() for _ in range(num_rows)]
        self._reach: list[list[float]] = [[] for _ in range(num_rows)]

    def restart(self, row: int) -> None:
        """Reset the rates of one row."""
        self._stats[row] = AcceptanceStats.from_prior()

    def limit(self, row: int) -> int:
        """Return the maximum and begin a new draft."""
        self._reach[row] = []
        return self.max_draft_tokens

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Compare the expected gain of the rows with the cost of another level."""
        gains = []
        for token in newest:
            self._reach[token.row].append(token.reach)
            stats = self._stats[token.row]
            gains.append(stats.nodes.rate(probability_bin(token.reach)) * stats.levels.rate(None))
        levels = max((len(self._reach[token.row]) for token in newest), default=0)
        cost = self.level_cost(levels) if self.level_cost else LevelCost()
        surpluses = [max(gain - cost.per_row, 0.0) for gain in gains]
        pays = sum(surpluses) > cost.shared
        return [pays and surplus > 0.0 for surplus in surpluses]

    def learn(self, row: int, drafted: int, accepted: int, gained: int) -> None:
        """Update the rates of a row that drafted some levels and gained `gained` tokens.

        `accepted` counts levels that these tokens follow, whether or not they were verified.
        """
        for level, reach in enumerate(self._reach[row], start=1):
            if level > gained and accepted == gained:
                break
            self._stats[row].nodes.count(probability_bin(reach), level <= accepted)
        for level in range(1, min(drafted, gained, accepted + 1) + 1):
            self._stats[row].levels.count(None, level <= accepted)


# From a strategy config and the target model.
MakePolicy = Callable[[Any, PreTrainedModel], LengthPolicy]

_MAKERS: dict[str, MakePolicy] = {
    "static": lambda options, _: LengthPolicy(options.max_draft_tokens),
    "heuristic": lambda options, _: HeuristicPolicy(options.max_draft_tokens),
    MEASURED: lambda options, _: MeasuredPolicy(options.max_draft_tokens),
    "confidence": lambda options, _: ConfidencePolicy(
        options.max_draft_tokens, options.confidence_threshold
    ),
    HEAD: lambda options, _: HeadPolicy(options.max_draft_tokens, options.confidence_threshold),
}


def register_policy(name: str, maker: MakePolicy) -> None:
    """Register `length_policy=name`."""
    if name in _MAKERS:
        raise ValueError(f"length_policy {name!r} is already registered")
    _MAKERS[name] = maker


def known_policies() -> list[str]:
    """Return the names of all registered policies, sorted."""
    return sorted(_MAKERS)


def check_policy(name: object) -> None:
    """Raise `OptionError` if no policy has this name."""
    if not isinstance(name, str) or name not in _MAKERS:
        raise OptionError(f"unknown length_policy {name!r}; {choices(name, known_policies())}")


def make_policy(options: Any, target: PreTrainedModel) -> LengthPolicy:
    """Return a new policy as configured."""
    check_policy(options.length_policy)
    return _MAKERS[options.length_policy](options, target)
