"""Length policies: when a drafter that drafts step by step should stop, per row.

==============  ================================================================================
`static`        always `max_draft_tokens`
`heuristic`     two more after a round in which every token was accepted, else one fewer
                (transformers' rule; the dynHeur baseline of Mamou et al. 2024, arXiv 2405.04304)
`confidence`    stop after the first token whose draft probability is below the threshold
                (transformers' dynamic speculation)
`head`          stop after the first token that the drafter's own confidence head gives a chance
                of acceptance below the threshold (DSpark; `hf_spec.methods.block.markov`)
`measured`      stop where the next level is not worth its time
                (`hf_spec.drafting.cost_model.cost_model_drafter`)
==============  ================================================================================

Others are added from outside with `register_policy`, as is DISCO's classifier. A policy is asked
after every drafted token, the first one included; the token it stops after is still sent to the
target. It knows what was drafted so far, past rounds and times, and nothing else, so a draft that
was drawn at random stays one that residual rejection can judge.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.cost_model.acceptance_stats import (
    EXPECTATION_WEIGHT,
    PROBABILITY_KINDS,
    DecayedRates,
    shares_of_levels,
)
from hf_spec.engine.forward.draft_tree import Verdict

# The policy that decides by the time that rounds take, and the one that asks a head of the drafter.
MEASURED = "measured"
HEAD = "head"


@dataclass(frozen=True)
class DraftedToken:
    """The newest draft token of a row; in a tree, the end of the likeliest path.

    Attributes:
        row, token: the sequence, and the token's id.
        position: counted from the beginning of the generation, 0 for the first generated token.
        probability: the draft model's, after its own prefix.
        score: what `LengthPolicy.score` made of the distribution it was taken from, or what the
            drafter's confidence head says of it.
        reach: the drafter's probability that the target goes to what the row would draft on from;
            in a tree, of all its ends together.
    """

    row: int
    token: int
    position: int
    probability: float
    score: float = 0.0
    reach: float = 1.0


@dataclass
class LengthPolicy:
    """Always drafts the maximum of tokens (levels of a tree) a round; the base of the others."""

    max_draft_tokens: int

    @property
    def longest(self) -> int:
        """Most tokens that any row may ever draft."""
        return self.max_draft_tokens

    def start(self, num_rows: int) -> None:
        """Begin a generation of `num_rows` rows."""

    def restart(self, row: int) -> None:
        """Forget what was kept of `row`: a new sequence begins there."""

    def limit(self, row: int) -> int:
        """Most tokens that `row` may draft this round."""
        return self.max_draft_tokens

    def score(self, draft_probs: Tensor, positions: Sequence[int]) -> Tensor | None:
        """(M,) float32: what `goes_on` wants to know of (M, V) draft distributions on the device.

        It reaches the host with the tokens; None where probabilities are enough. For `positions`
        see `DraftedToken`.
        """
        return None

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Per growing row whether it drafts on after its newest token."""
        return [True] * len(newest)

    def observe(self, row: int, drafted: int, accepted: int) -> None:
        """Learn how many levels of the last draft of `row` were accepted."""

    def observe_all(self, verdict: Verdict) -> None:
        """The same of every row of a tree."""
        for row, accepted in enumerate(verdict.accepted):
            if verdict.tree.nodes(row):
                self.observe(row, verdict.tree.height(row), len(accepted))


@dataclass
class HeuristicPolicy(LengthPolicy):
    """Two more after a fully accepted draft, one fewer otherwise, never fewer than one."""

    @property
    def longest(self) -> int:
        """It grows as long as all is accepted."""
        return sys.maxsize

    def start(self, num_rows: int) -> None:
        """Begin every row at the configured length."""
        self._limits = [self.max_draft_tokens] * num_rows

    def restart(self, row: int) -> None:
        """Begin one row at the configured length."""
        self._limits[row] = self.max_draft_tokens

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
    """Stop after a token whose draft probability is below the threshold."""

    threshold: float = 0.4

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each token was likely enough."""
        return [token.probability >= self.threshold for token in newest]


@dataclass
class HeadPolicy(LengthPolicy):
    """Stop after a token that the drafter's confidence head gives less than the threshold."""

    threshold: float = 0.4

    def goes_on(self, newest: Sequence[DraftedToken]) -> list[bool]:
        """Whether each token was likely enough to be accepted."""
        return [token.score >= self.threshold for token in newest]


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
        self._came_true = [_shares_of_tenths() for _ in range(num_rows)]
        self._went_on = [shares_of_levels() for _ in range(num_rows)]
        self._reach: list[list[float]] = [[] for _ in range(num_rows)]

    def restart(self, row: int) -> None:
        """Nothing is known of one row."""
        self._came_true[row], self._went_on[row] = _shares_of_tenths(), shares_of_levels()

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


def _shares_of_tenths() -> DecayedRates:
    return DecayedRates(lambda kind: (kind + 0.5) / PROBABILITY_KINDS, EXPECTATION_WEIGHT)


def _tenth(probability: float) -> int:
    # Processors may leave nothing possible: NaN is no likelihood.
    if not probability > 0:
        return 0
    return min(int(probability * PROBABILITY_KINDS), PROBABILITY_KINDS - 1)


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
    """Make a policy known as `length_policy=name`, made of (strategy config, target model)."""
    if name in _MAKERS:
        raise ValueError(f"there is a length_policy {name!r} already")
    _MAKERS[name] = maker


def known_policies() -> list[str]:
    """Names of all registered policies, sorted."""
    return sorted(_MAKERS)


def check_policy(name: object) -> None:
    """Refuse a name that no policy has (`OptionError`)."""
    if not isinstance(name, str) or name not in _MAKERS:
        raise OptionError(f"unknown length_policy {name!r}; {choices(name, known_policies())}")


def make_policy(options: Any, target: PreTrainedModel) -> LengthPolicy:
    """The policy that a strategy config asks for, for one generation."""
    check_policy(options.length_policy)
    return _MAKERS[options.length_policy](options, target)
