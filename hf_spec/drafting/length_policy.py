"""Length policies: when a drafter that drafts step by step should stop, per row.

==============  ================================================================================
`static`        always `max_draft_tokens`
`heuristic`     two more after a round in which every token was accepted, else one fewer
                (transformers' rule; the dynHeur baseline of Mamou et al. 2024, arXiv 2405.04304)
`confidence`    stop after the first token whose draft probability is below the threshold
                (transformers' dynamic speculation)
==============  ================================================================================

Others are added from outside with `register_policy`: DISCO's classifier, and "measured", which
weighs what a token is worth against what it costs (`hf_spec.drafting.measured`). A policy is
asked after every drafted token, the first one included; the token it stops after is still sent to
the target. It knows what was drafted so far, past rounds and times, and nothing else, so a draft
that was drawn at random stays one that residual rejection can judge.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.errors import OptionError, choices

# The policy that decides by the time that rounds take.
MEASURED = "measured"


@dataclass(frozen=True)
class DraftedToken:
    """The newest draft token of a row; in a tree, the end of the likeliest path.

    Attributes:
        row: the sequence.
        token: its id.
        position: counted from the beginning of the generation, 0 for the first generated token.
        probability: the draft model's, after its own prefix.
        score: what `LengthPolicy.score` made of the distribution it was taken from.
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


@dataclass
class HeuristicPolicy(LengthPolicy):
    """Two more after a fully accepted draft, one fewer otherwise, never fewer than one."""

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


MakePolicy = Callable[[Any, PreTrainedModel], LengthPolicy]

_MAKERS: dict[str, MakePolicy] = {
    "static": lambda options, _: LengthPolicy(options.max_draft_tokens),
    "heuristic": lambda options, _: HeuristicPolicy(options.max_draft_tokens),
    "confidence": lambda options, _: ConfidencePolicy(
        options.max_draft_tokens, options.confidence_threshold
    ),
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
