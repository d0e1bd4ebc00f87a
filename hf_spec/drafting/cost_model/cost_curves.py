"""Measured costs: seconds of the target's forward pass by nodes, and of each draft by depth.

Timings come from the rounds (`round_timer`) and are cached on the target model. Before the first
one, an expected cost in units of one forward pass is used.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from statistics import median_low
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from hf_spec.backend.cpu.packed_weights import cpu_packing_bytes
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.errors import OptionError
from hf_spec.drafting.cost_model.acceptance_stats import (
    MEMORY_DECAY,
    AcceptanceStats,
    DraftMemory,
    NodePriors,
)
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.engine.forward.model_cache import cached_per_model

# Expected costs before any measurement, in forward passes of the target over one node: of another
# node, and of a drafter's forward pass. Low, so that drafts are tried and their real cost measured.
NODE_COST = 0.01
FORWARD_COST = 0.15
# No drafter is expected to cost more: its real cost would never be measured.
MAX_FORWARD_COST = 0.5
# The same of a token of text that a drafter reads, in its own forward passes.
READ_COST = 0.05
# Sizes at which timings are stored. Others are recorded at the next larger one: matrix products run
# in tiles, so the first node of a tile costs the most, and must not raise the cost of a step
# without a draft.
KNOTS = (1, 2, 3, *(base * 2**power for power in range(18) for base in (4, 5, 6, 7)))
# The cost of a size is the median of its last timings, the lower one of an even number: single
# rounds take several times as long, because of other processes or a compilation.
NUM_TIMINGS = 15
# A single timing of more than this many times the estimate before is not believed, until there is a
# second one: a size that seems too expensive would never be timed again.
LARGEST_FACTOR = 1.5
# The timings of a size are dropped after this many timings of other sizes: they may be wrong. Since
# timing them again costs time, the number doubles with every drop, up to this power of two.
LIFETIME = 100
MOST_LIFETIME_DOUBLINGS = 10
# The same for the smallest size, by which the others are judged: rounds without a draft, of which a
# generation that always drafts has none by itself.
SMALLEST_LIFETIME = 4 * LIFETIME
# The timings of a size are up to date for this many timings.
FRESH = 64
# Timings of one size after which its cost is considered known.
NUM_RELIABLE = 2
# Last timings of known sizes whose median shows how slow the machine is at the moment. It may be a
# fifth slower in one minute than in another, and a generation may run rounds of one size only.
NUM_SLOWDOWNS = 5
# A forward pass may be larger than all that were timed by this factor, or by this number of nodes:
# at high loads every node costs, and the expected cost is low.
GROWTH, MORE_NODES = 1.5, 7

# Key of configured timings that stands for all drafters that are not named.
OTHERS = "*"


def interpolate(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Return seconds for `size` on the line through the two sizes around it or nearest to it."""
    after = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    (x, z), (y, w) = sizes[after - 1 : after + 1], seconds[after - 1 : after + 1]
    return y + (w - y) * (size - x) / (z - x)


class Curve:
    """Non-decreasing cost through (size, seconds) points, linear between them and after the last.

    Other processes only ever add time. So the fastest timing of a size counts, and a size costs no
    more than a larger one.
    """

    def __init__(self, points: Iterable[Sequence[float]]):
        ordered = sorted((size, seconds) for size, seconds in points)
        self.sizes = sorted({size for size, _ in ordered})
        self.seconds = [min(s for other, s in ordered if other >= size) for size in self.sizes]

    def __call__(self, size: float) -> float:
        """Return seconds for `size`; below the first point, those of the first point."""
        if size <= self.sizes[0] or len(self.sizes) == 1:
            return self.seconds[0]
        return interpolate(self.sizes, self.seconds, size)


class SizeTimings(NamedTuple):
    """Timings of one size.

    Attributes:
        before: estimate before the first timing.
        number: number of timings.
        last: index of the last timing among those of all sizes.
        seconds: the last `NUM_TIMINGS`, divided by the slowdown at their time.
        cost: the estimate, divided by the slowdown.
        is_believed: True if the estimate follows from the timings.
    """

    before: float
    number: int = 0
    last: int = 0
    seconds: tuple[float, ...] = ()
    cost: float = math.inf
    is_believed: bool = False

    def with_timing(self, seconds: float, index: int) -> SizeTimings:
        """Return the timings and another one."""
        kept = (*self.seconds[1 - NUM_TIMINGS :], seconds)
        believed = self.number > 0 or seconds <= LARGEST_FACTOR * self.before
        cost = median_low(kept) if believed else self.before
        return SizeTimings(self.before, self.number + 1, index, kept, cost, believed)


class LearnedCurve:
    """Cost by size from medians of timings: interpolated between knots, proportional beyond them.

    Beyond the largest knot, a node costs at least as much as between half of it and it: where
    arithmetic limits the speed, the expected cost is too low. If it `scales`, timings of known
    sizes show how slow the machine is at the moment, and the costs of all sizes follow. Those of
    drafts also depend on the text that is read, and end when the drafter is not chosen any more.

    `expected` costs, in any unit, are used for proportions and before the first timing. Generations
    in several threads may share a curve: data is replaced, never modified.
    """

    def __init__(self, expected: Callable[[float], float], scales: bool = False):
        self._expected = expected
        self._scales = scales
        # size -> its timings; sizes ascend.
        self._timings: dict[float, SizeTimings] = {}
        self._points: tuple[list[float], list[float]] = ([], [])
        self._slowdowns: tuple[float, ...] = (1.0,) * NUM_SLOWDOWNS
        self._count = self._num_drops = 0

    @property
    def has_timings(self) -> bool:
        """True once a timing was recorded."""
        return bool(self._timings)

    @property
    def is_known(self) -> bool:
        """True if this curve, or the one that is expected, has timings."""
        expected = self._expected
        return self.has_timings or (isinstance(expected, LearnedCurve) and expected.is_known)

    def is_reliable(self, size: float) -> bool:
        """Return True if `size` or a smaller size has enough timings."""
        known = self._timings.items()
        return any(of.number >= NUM_RELIABLE and knot <= size for knot, of in known)

    def is_stale(self, size: float) -> bool:
        """Return True if `size` is known, but none of the last timings was of it."""
        known = self._timings.get(_knot(size))
        return known is not None and known.last <= self._count - FRESH

    def __call__(self, size: float) -> float:
        """Return the cost of `size`: in seconds, or as `expected` before the first timing."""
        sizes, seconds = self._points
        if not sizes:
            return self._expected(size)
        if sizes[0] < size <= sizes[-1]:
            return interpolate(sizes, seconds, size)
        nearest = 0 if size <= sizes[0] else -1
        cost = seconds[nearest] * self._expected_ratio(size, sizes[nearest])
        before = bisect_left(sizes, sizes[-1] / 2)
        if nearest == 0 or before == len(sizes) - 1:
            return cost
        slope = (seconds[-1] - seconds[before]) / (sizes[-1] - sizes[before])
        return max(cost, seconds[-1] + slope * (size - sizes[-1]))

    @property
    def largest_trial(self) -> float:
        """The largest size whose cost may be tried; unlimited before the first timing."""
        known = [size for size, of in self._timings.items() if of.is_believed]
        return max(GROWTH * known[-1], known[-1] + MORE_NODES) if known else math.inf

    def learn(self, size: float, seconds: float, expected: float = math.inf) -> None:
        """Record one timing at the knot from `size` on; `expected` is for the first of all."""
        knot = _knot(size)
        # The known costs define the step from one size to another.
        cost = self(size)
        scale = self(knot) / cost if cost > 0 else self._expected_ratio(knot, size)
        before = self(knot) if self.has_timings else scale * expected
        timings = self._timings.get(knot, SizeTimings(before / median_low(self._slowdowns)))
        if self._scales and size == knot and timings.number >= NUM_RELIABLE and timings.cost > 0:
            ratio = seconds / timings.cost
            if 1 / LARGEST_FACTOR <= ratio <= LARGEST_FACTOR:
                self._slowdowns = (*self._slowdowns[1:], ratio)
        slowdown = median_low(self._slowdowns)
        self._count += 1
        new = {**self._timings, knot: timings.with_timing(scale * seconds / slowdown, self._count)}
        lifetimes = dict.fromkeys(new, LIFETIME * 2**self._num_drops)
        lifetimes[smallest := min(new)] = SMALLEST_LIFETIME
        dropped = {k for k, of in new.items() if of.last <= self._count - lifetimes[k]}
        if dropped - {smallest}:
            self._num_drops = min(self._num_drops + 1, MOST_LIFETIME_DOUBLINGS)
        self._timings = {knot: new[knot] for knot in sorted(new.keys() - dropped)}
        costs = [slowdown * of.cost for of in self._timings.values()]
        # A size costs no more than a larger one: one that was timed in a slow minute would, and
        # with few rows left, drafts would seem to pay.
        self._points = list(self._timings), list(accumulate(reversed(costs), min))[::-1]

    def _expected_ratio(self, size: float, other: float) -> float:
        expected = self._expected(other)
        return self._expected(size) / expected if expected > 0 else size / other


@dataclass(frozen=True)
class Costs:
    """Seconds of the target's forward pass by nodes, and of each drafter's draft by depth.

    `read` are those in which a drafter reads a number of new tokens before it drafts. `branch` is
    the weight with which the nodes above a branch count again, because recurrent layers run every
    path of a tree from its root.
    """

    verify: Callable[[float], float]
    draft: Mapping[str, Callable[[float], float]]
    read: Mapping[str, Callable[[float], float]] = field(default_factory=dict)
    branch: float = 0.0

    @classmethod
    def from_timings(cls, timings: Mapping[str, Any], drafters: Sequence[str]) -> Costs:
        """Return the costs of configured timings that passed `check_timings`.

        Raises:
            OptionError: if the timings lack a drafter.
        """
        known = timings["draft"]
        points = {name: known.get(name, known.get(OTHERS)) for name in drafters}
        if missing := [name for name in drafters if points[name] is None]:
            raise OptionError(
                f"timings['draft'] lacks {missing[0]!r}; it has "
                f"{', '.join(map(repr, known)) or 'nothing'}"
            )
        draft = {name: Curve([(0, 0.0), *points[name]]) for name in drafters}
        return cls(Curve(timings["verify"]), draft)


class RoundTimes:
    """Measured times of a target and a set of drafters, without references to the models.

    Args:
        similar: times with another number of rows: what is expected before the first own ones.

    Attributes:
        verify: time of the target's forward pass by nodes.
        idle_drafts: last drafts in a row, without a model, of which no node was sent.
    """

    def __init__(self, similar: RoundTimes | None = None) -> None:
        self.idle_drafts = 0
        self._expected: Mapping[str, float] = {}
        self._memories: dict[int, DraftMemory] = {}
        self._draft: dict[str, LearnedCurve] = {}
        self._read: dict[str, LearnedCurve] = {}
        expected: Callable[[float], float] = similar.verify if similar else _expected_verify
        self.verify: LearnedCurve = LearnedCurve(expected, scales=True)
        if similar is not None:
            # Copies, because another thread may add to them.
            self._draft = {name: LearnedCurve(of) for name, of in similar._draft.copy().items()}
            self._read = {name: LearnedCurve(of) for name, of in similar._read.copy().items()}
            self._memories = {
                index: DraftMemory(memory.stats.copy())
                for index, memory in similar._memories.copy().items()
            }

    def costs(
        self,
        forwards: Mapping[str, Callable[[int], int]],
        expected: Mapping[str, float] = MappingProxyType({}),
    ) -> Costs:
        """Return the current costs.

        Args:
            forwards: drafter -> its forward passes by depth.
            expected: drafter -> cost of a forward pass before the first timing, in those of the
                target. Default: `FORWARD_COST`.
        """
        self._expected = {name: min(cost, MAX_FORWARD_COST) for name, cost in expected.items()}
        return Costs(
            self.verify,
            {name: self._draft_cost(name, of) for name, of in forwards.items()},
            {name: partial(self._read_seconds, name) for name in forwards},
        )

    def memory(self, index: int, prior: NodePriors) -> DraftMemory:
        """Return the memory of draft source `index`; for `prior` see `DraftSource`."""
        if index not in self._memories:
            stats = AcceptanceStats.from_prior(prior, MEMORY_DECAY)
            self._memories[index] = DraftMemory(stats)
        return self._memories[index]

    def learn(
        self,
        nodes: float,
        verify_seconds: float | None,
        drafts: Mapping[str, tuple[int, int, float]],
    ) -> None:
        """Record nodes and seconds of the target; forward passes, tokens read, seconds of drafts.

        Seconds of the target that are None are not recorded. Before the first ones, drafts are not
        recorded either: expected costs of the target have no unit.
        """
        if verify_seconds is not None:
            self.verify.learn(nodes, verify_seconds)
        if not self.verify.has_timings:
            return
        for name, (count, unread, seconds) in drafts.items():
            # The time of drafters without forward passes is negligible.
            if not count:
                continue
            curve, expected = self._curve(name), self._seconds(name, count)
            if not unread or seconds < expected:
                curve.learn(count, seconds, expected)
            elif curve.is_known:
                # The first passes of a process may include a compilation.
                most = LARGEST_FACTOR * self._read_seconds(name, unread)
                reading = min(seconds - expected, most)
                self._read.setdefault(name, LearnedCurve(float)).learn(unread, reading)

    def _curve(self, name: str) -> LearnedCurve:
        return self._draft.setdefault(name, LearnedCurve(float))

    def _seconds(self, name: str, count: int) -> float:
        curve = self._curve(name)
        if curve.is_known:
            return curve(count)
        return self._expected.get(name, FORWARD_COST) * count * self.verify(1)

    def _read_seconds(self, name: str, unread: float) -> float:
        if not unread:
            return 0.0
        curve = self._read.get(name)
        return READ_COST * unread * self._seconds(name, 1) if curve is None else curve(unread)

    def _draft_cost(self, name: str, forwards: Callable[[int], int]) -> Callable[[float], float]:
        def draft(depth: float) -> float:
            count = forwards(math.ceil(depth))
            return self._seconds(name, count) if count else 0.0

        return draft


def cached_times(target: PreTrainedModel, key: Hashable, num_rows: int) -> RoundTimes:
    """Return the timings cached for the target, number of rows and drafters (`key`).

    New ones start from those with the most similar number of rows.
    """
    # These settings affect the time of a forward pass, too.
    machine = (
        execution_device(target.get_input_embeddings()),
        target.dtype,
        torch.get_num_threads(),
        cpu_packing_bytes() > 0,
        CompiledLayers.of(target).wanted,
    )
    by_rows: dict[int, RoundTimes] = cached_per_model(target, ("rounds", machine, key), dict)
    if (times := by_rows.get(num_rows)) is None:
        nearest = min([*by_rows], key=lambda rows: abs(math.log(rows / num_rows)), default=None)
        similar = None if nearest is None else by_rows[nearest]
        # Another thread may have been faster.
        times = by_rows.setdefault(num_rows, RoundTimes(similar))
    return times


def check_timings(timings: object) -> None:
    """Raise `OptionError` unless `timings` has the format that its message shows."""
    curves: list[object] = []
    if isinstance(timings, dict) and set(timings) == {"verify", "draft"}:
        draft = timings["draft"]
        curves = [timings["verify"], *draft.values()] if isinstance(draft, dict) else []
    if not curves or not all(_is_curve(points) for points in curves):
        raise OptionError(
            f"timings={timings!r:.80} must be like {{'verify': [[1, 0.030], [16, 0.040]], 'draft': "
            "{'tree': [[1, 0.003], [4, 0.012]]}}: seconds of a forward pass by nodes, and of a "
            "draft by depth"
        )


def _expected_verify(nodes: float) -> float:
    return 1.0 + NODE_COST * nodes


def _knot(size: float) -> float:
    return KNOTS[min(bisect_left(KNOTS, size), len(KNOTS) - 1)]


def _is_curve(points: object) -> bool:
    return (
        isinstance(points, (list, tuple))
        and bool(points)
        and all(isinstance(point, (list, tuple)) and len(point) == 2 for point in points)
        and all(
            isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1e9
            for point in points
            for value in point
        )
    )
