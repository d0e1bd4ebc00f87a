"""Measured costs: seconds of the target's forward pass by nodes, and of each draft by depth.

Timings come from the rounds (`round_timer`) and are cached on the target model. Before the first
one, an expected cost in units of one forward pass is used.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.backend.cpu.packed_weights import cpu_packing_bytes
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.errors import OptionError
from hf_spec.drafting.cost_model.acceptance_stats import MEMORY_DECAY, AcceptanceStats
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.engine.forward.model_cache import cached_per_model

# Expected costs before any measurement, in forward passes of the target over one node: of another
# node, and of a drafter's forward pass. Low, so that drafts are tried and their real cost measured.
NODE_COST = 0.01
FORWARD_COST = 0.15
# Sizes at which means are stored. Other sizes are recorded at the nearest one.
KNOTS = (1, 2, 3, *(base * 2**power for power in range(2, 20) for base in (1, 1.5)))
# The first timings of a size are combined by their minimum: one outlier would bias a mean for long.
NUM_MINIMUM = 3
# Later ones update a mean with this weight. Other processes can make a round many times slower, so
# a timing counts at most LARGEST_FACTOR times the current estimate.
MEAN_WEIGHT = 0.1
LARGEST_FACTOR = 1.5
# A mean is dropped after this many timings of other sizes: it may come from a slow moment.
LIFETIME = 100
# Timings of one size after which its cost is considered known.
NUM_RELIABLE = 2


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


class LearnedCurve:
    """Cost by size from measured means: interpolated between knots, proportional beyond them.

    `expected` costs, in any unit, are used for proportions and before the first timing. Generations
    in several threads may share a curve: data is replaced, never modified.
    """

    def __init__(self, expected: Callable[[float], float]):
        self._expected = expected
        # size -> (number of timings, mean, index of the last timing); sizes ascend.
        self._means: dict[float, tuple[int, float, int]] = {}
        self._points: tuple[list[float], list[float]] = ([], [])
        self._count = 0

    @property
    def has_timings(self) -> bool:
        """True once a timing was recorded."""
        return bool(self._means)

    def is_reliable(self, size: float) -> bool:
        """Return True if `size` or a smaller size has enough timings."""
        means = self._means.items()
        return any(times >= NUM_RELIABLE and knot <= size for knot, (times, *_) in means)

    def __call__(self, size: float) -> float:
        """Return the cost of `size`: in seconds, or as `expected` before the first timing."""
        sizes, seconds = self._points
        if not sizes:
            return self._expected(size)
        if sizes[0] < size <= sizes[-1]:
            return interpolate(sizes, seconds, size)
        nearest = 0 if size <= sizes[0] else -1
        return seconds[nearest] * self._expected(size) / self._expected(sizes[nearest])

    def learn(self, size: float, seconds: float) -> None:
        """Record one timing at the knot nearest to `size`."""
        above = bisect_right(KNOTS, size)
        neighbors = KNOTS[max(above - 1, 0) : above + 1]
        knot = min(neighbors, key=lambda knot: abs(math.log(knot / size)))
        seconds *= self._expected(knot) / self._expected(size)
        if self.has_timings:
            seconds = min(seconds, LARGEST_FACTOR * self(knot))
        times, mean, _ = self._means.get(knot, (0, math.inf, 0))
        self._count += 1
        by_minimum = times < NUM_MINIMUM
        mean = min(mean, seconds) if by_minimum else mean + MEAN_WEIGHT * (seconds - mean)
        means = {**self._means, knot: (times + 1, mean, self._count)}
        oldest = self._count - LIFETIME
        self._means = {s: entry for s, entry in sorted(means.items()) if entry[2] > oldest}
        self._points = list(self._means), [mean for _, mean, _ in self._means.values()]


@dataclass(frozen=True)
class Costs:
    """Seconds of the target's forward pass by nodes, and of each drafter's draft by depth.

    `branch` is the weight with which the nodes above a branch count again, because recurrent layers
    run every path of a tree from its root.
    """

    verify: Callable[[float], float]
    draft: Mapping[str, Callable[[float], float]]
    branch: float = 0.0

    @classmethod
    def from_timings(cls, timings: Mapping[str, Any]) -> Costs:
        """Return the costs of configured timings that passed `check_timings`."""
        draft = {name: Curve([(0, 0.0), *points]) for name, points in timings["draft"].items()}
        return cls(Curve(timings["verify"]), draft)


class RoundTimes:
    """Timings and acceptance rates of a target and set of drafters, which it does not reference."""

    def __init__(self) -> None:
        self._memories: dict[int, AcceptanceStats] = {}
        self.verify = LearnedCurve(lambda nodes: 1.0 + NODE_COST * nodes)
        self._draft: dict[str, LearnedCurve] = {}

    def costs(self, forwards: Mapping[str, Callable[[int], int]]) -> Costs:
        """Return the current costs; `forwards` maps a drafter to its forward passes by depth."""
        return Costs(self.verify, {name: self._cost(name, of) for name, of in forwards.items()})

    def memory(self, index: int, prior: tuple[float, float]) -> AcceptanceStats:
        """Return the acceptance rates of draft source `index`; for `prior` see `DraftSource`."""
        return self._memories.setdefault(index, AcceptanceStats.from_prior(prior, MEMORY_DECAY))

    def learn(
        self, nodes: float, verify_seconds: float, drafts: Mapping[str, tuple[int, float]]
    ) -> None:
        """Record nodes and seconds of the target, and (forward passes, seconds) of each draft."""
        self.verify.learn(nodes, verify_seconds)
        for name, (count, seconds) in drafts.items():
            # The time of drafters without forward passes is negligible.
            if count:
                self._curve(name).learn(count, seconds)

    def _curve(self, name: str) -> LearnedCurve:
        return self._draft.setdefault(name, LearnedCurve(lambda count: FORWARD_COST * count))

    def _cost(self, name: str, forwards: Callable[[int], int]) -> Callable[[float], float]:
        curve = self._curve(name)

        def draft(depth: float) -> float:
            count = forwards(math.ceil(depth))
            unit = 1.0 if curve.has_timings else self.verify(1)
            return curve(count) * unit if count else 0.0

        return draft


def cached_times(target: PreTrainedModel, key: Hashable, num_rows: int) -> RoundTimes:
    """Return the timings cached for the target, number of rows and drafters (`key`)."""
    # These settings affect the time of a forward pass, too.
    machine = (
        execution_device(target.get_input_embeddings()),
        target.dtype,
        torch.get_num_threads(),
        cpu_packing_bytes() > 0,
        CompiledLayers.of(target).wanted,
    )
    return cached_per_model(target, ("rounds", num_rows, machine, key), RoundTimes)


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
