"""Acceptance rates of the nodes and levels of drafts, with decaying weights."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from hf_spec.drafting.cost_model.exploration import Exploration

# Decay of old trials per trial, and number of trials that the prior weighs.
DECAY = 0.95
PRIOR_WEIGHT = 10.0
# For drafters without probabilities: kind of draft -> prior of the first node at depth 1, and of
# deeper ones.
NodePriors = Mapping[Any, tuple[float, float]]
NODE_PRIOR = 0.5, 0.7
ONE_PRIOR: NodePriors = MappingProxyType({None: NODE_PRIOR})
# The prior of levels weighs less: a drafter that fails must be detected fast. The prior of a deeper
# level is the rate of the level above it.
LEVEL_PRIOR = 0.6
LEVEL_PRIOR_WEIGHT = 3.0
# Decay of the rates of earlier generations, whose trials count longer.
MEMORY_DECAY = 0.99

# Kinds of nodes with probabilities: tenths.
PROBABILITY_BINS = 10


class DecayedRates:
    """Success rate per kind of trial, with decaying weights.

    The prior counts as the first `weight` trials and decays like all others, so a kind that never
    succeeds reaches a rate of 0.
    """

    def __init__(self, prior: Callable[..., float], weight: float, decay: float = DECAY):
        self._prior = prior
        self._weight = weight
        self._decay = decay
        # kind -> (successes, trials), both decayed.
        self._trials: dict[Hashable, tuple[float, float]] = {}

    def rate(self, kind: Hashable) -> float:
        """Return the rate of `kind`, between 0 and 1."""
        counted = self._trials.get(kind)
        return self._prior(kind) if counted is None else counted[0] / counted[1]

    def count(self, kind: Hashable, success: bool) -> None:
        """Count a trial."""
        counted = self._trials.get(kind)
        successes, trials = counted or (self._weight * self.rate(kind), self._weight)
        new = self._decay * successes + success, self._decay * trials + 1
        # A new dictionary, because copies share the old one.
        self._trials = {**self._trials, kind: new}

    def fade(self, retention: float) -> None:
        """Reduce the weight of all trials, but not below the weight of the prior."""
        faded = {}
        for kind, (successes, trials) in self._trials.items():
            kept = max(retention, min(1.0, self._weight / trials))
            faded[kind] = kept * successes, kept * trials
        self._trials = faded


def probability_bin(probability: float) -> int:
    """Return a probability in tenths, the kind of nodes by which it is calibrated."""
    # A distribution in which the processors leave no token has NaN probabilities.
    if not probability > 0:
        return 0
    return min(int(probability * PROBABILITY_BINS), PROBABILITY_BINS - 1)


class LevelRates(DecayedRates):
    """Acceptance rates of levels by depth; a level without trials has the rate of the one above."""

    def __init__(self, decay: float):
        super().__init__(lambda _: LEVEL_PRIOR, LEVEL_PRIOR_WEIGHT, decay)

    def rate(self, kind: Hashable) -> float:
        """See `DecayedRates`; `kind` is a depth, or None for any."""
        if kind not in self._trials and isinstance(kind, int) and kind > 1:
            return self.rate(kind - 1)
        return super().rate(kind)


@dataclass(eq=False)
class AcceptanceStats:
    """Acceptance rates of one drafter: of nodes by kind, and of levels by depth.

    Attributes:
        nodes: rates of nodes.
        levels: rates of levels with all their nodes.
        first: rates of the most probable node of a level, as in a chain.
    """

    nodes: DecayedRates
    levels: DecayedRates
    first: DecayedRates

    @classmethod
    def from_prior(cls, prior: NodePriors = ONE_PRIOR, decay: float = DECAY) -> AcceptanceStats:
        """Return stats without trials; for `prior` see `DraftSource`."""
        nodes = DecayedRates(partial(_prior_rate, prior), PRIOR_WEIGHT, decay)
        return cls(nodes, LevelRates(decay), LevelRates(decay))

    def copy(self) -> AcceptanceStats:
        """Return independent stats with the same trials."""
        return AcceptanceStats(copy(self.nodes), copy(self.levels), copy(self.first))

    def as_prior(self) -> AcceptanceStats:
        """Return stats without trials whose prior are the current rates."""
        nodes = DecayedRates(copy(self.nodes).rate, PRIOR_WEIGHT)
        levels, first = (
            DecayedRates(copy(rates).rate, LEVEL_PRIOR_WEIGHT)
            for rates in (self.levels, self.first)
        )
        return AcceptanceStats(nodes, levels, first)


@dataclass(eq=False)
class DraftMemory:
    """Acceptance rates and explorations of a draft source from earlier generations."""

    stats: AcceptanceStats
    explorations: dict[int, Exploration] = field(default_factory=dict)


def _prior_rate(prior: NodePriors, kind: int | tuple[Hashable, int, int]) -> float:
    if isinstance(kind, int):
        return (kind + 0.5) / PROBABILITY_BINS
    draft_kind, depth, rank = kind
    return prior[draft_kind][depth > 1] / (1 if rank == 0 else 4)
