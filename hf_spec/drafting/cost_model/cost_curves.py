"""What a round of decoding costs: a draft, by its depth, and a forward of the target, by its nodes.

Costs are curves through measured times: given ones (`Curve`), or those of the rounds of the
generation itself (`LearnedCurve`). Such a round is timed by its drafter, which is called before the
target's forward and again once the target's tokens are known on the host; no forward is extra, and
nothing waits for the device (see `hf_spec.backend.device.clock`). What was learned stays with the
model. Until then an expectation stands in, in units of one forward.
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

# What is expected before anything is timed, in forwards of the target over one node: another node,
# and a forward of a drafter. Nodes are expected to be cheap, so that their real price is found out.
NODE_PRICE = 0.01
FORWARD_PRICE = 0.15
# Sizes at which a mean is kept; others count for the nearest one.
KNOTS = (1, 2, 3, *(base * 2**power for power in range(2, 20) for base in (1, 1.5)))
# Weight of the newest time once there are some, and most that it counts for, in means: other work
# on the machine makes single rounds many times slower.
RATE = 0.1
LARGEST = 1.5
# Of so many first times of a size the least counts: in a mean a bad one would stay for long.
FIRST = 3
# A mean that so many others came after is forgotten: it may have been a bad moment.
LIFETIME = 100
# Times of one size after which it is known.
TIMES = 2


def straight(sizes: Sequence[float], seconds: Sequence[float], size: float) -> float:
    """Seconds for `size`, on the straight line through the two sizes around it or nearest to it."""
    after = min(max(bisect_left(sizes, size), 1), len(sizes) - 1)
    (x, z), (y, w) = sizes[after - 1 : after + 1], seconds[after - 1 : after + 1]
    return y + (w - y) * (size - x) / (z - x)


class Curve:
    """A cost that never falls: straight between (size, seconds) points, and on after the last one.

    Other work on a machine only ever adds time, so the fastest run of a size counts, and a size
    costs no more than a larger one.
    """

    def __init__(self, points: Iterable[Sequence[float]]):
        found = sorted((size, seconds) for size, seconds in points)
        self.sizes = sorted({size for size, _ in found})
        self.seconds = [min(s for other, s in found if other >= size) for size in self.sizes]
        self._known: dict[float, float] = {}

    def __call__(self, size: float) -> float:
        """Seconds for `size`; before the first point as there."""
        if size not in self._known:
            flat = size <= self.sizes[0] or len(self.sizes) == 1
            cost = self.seconds[0] if flat else straight(self.sizes, self.seconds, size)
            self._known[size] = cost
        return self._known[size]


class LearnedCurve:
    """A cost by size: means at some sizes, straight in between, in proportion elsewhere.

    Generations in several threads may share one: what is read is replaced, never changed.
    """

    def __init__(self, expected: Callable[[float], float]):
        self._expected = expected
        # size -> (how many times, their mean, when the last one came); sizes ascend.
        self._means: dict[float, tuple[int, float, int]] = {}
        self._points: tuple[list[float], list[float]] = ([], [])
        self._count = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was learned."""
        return bool(self._means)

    def reaches(self, size: float) -> bool:
        """Whether the cost of a size no larger than this is known."""
        return any(times >= TIMES and known <= size for known, (times, *_) in self._means.items())

    def __call__(self, size: float) -> float:
        """Cost of `size`, in seconds once anything was learned."""
        sizes, seconds = self._points
        if not sizes:
            return self._expected(size)
        if sizes[0] < size <= sizes[-1]:
            return straight(sizes, seconds, size)
        nearest = 0 if size <= sizes[0] else -1
        return seconds[nearest] * self._expected(size) / self._expected(sizes[nearest])

    def learn(self, size: float, seconds: float) -> None:
        """Add one measured time."""
        above = bisect_right(KNOTS, size)
        near = KNOTS[max(above - 1, 0) : above + 1]
        knot = min(near, key=lambda knot: abs(math.log(knot / size)))
        seconds *= self._expected(knot) / self._expected(size)
        if self.is_known:
            seconds = min(seconds, LARGEST * self(knot))
        times, mean, _ = self._means.get(knot, (0, math.inf, 0))
        self._count += 1
        mean = min(mean, seconds) if times < FIRST else mean + RATE * (seconds - mean)
        means = {**self._means, knot: (times + 1, mean, self._count)}
        oldest = self._count - LIFETIME
        self._means = {s: known for s, known in sorted(means.items()) if known[2] > oldest}
        self._points = list(self._means), [mean for _, mean, _ in self._means.values()]


@dataclass(frozen=True)
class Costs:
    """Seconds of the target's forward by nodes, and of each drafter's draft by depth.

    The nodes above a node that begins a branch count again with the weight `branch`: recurrent
    layers run every path of a tree from its root.
    """

    verify: Callable[[float], float]
    draft: Mapping[str, Callable[[float], float]]
    branch: float = 0.0

    @classmethod
    def of(cls, timings: Mapping[str, Any]) -> Costs:
        """Costs from measured points: "verify", a list, and "draft", one for each drafter."""
        draft = {name: Curve([(0, 0.0), *points]) for name, points in timings["draft"].items()}
        return cls(Curve(timings["verify"]), draft)


class RoundTimes:
    """The times of rounds with some drafters, and how their drafts fared.

    It may outlive the drafters and holds nothing of them.
    """

    def __init__(self) -> None:
        self._memories: dict[int, AcceptanceStats] = {}
        self._verify = LearnedCurve(lambda nodes: 1.0 + NODE_PRICE * nodes)
        self._draft: dict[str, LearnedCurve] = {}

    def costs(self, forwards: Mapping[str, Callable[[int], int]]) -> Costs:
        """Return the curves for `selection`; `forwards` maps a drafter to its passes by depth."""
        return Costs(self._verify, {name: self._cost(name, of) for name, of in forwards.items()})

    def memory(self, index: int, expected: tuple[float, float]) -> AcceptanceStats:
        """How the drafts of one of the sources fared; `expected` as in `Source`."""
        return self._memories.setdefault(index, AcceptanceStats.expected(expected, MEMORY_DECAY))

    def knows_plain(self, rows: int) -> bool:
        """Whether steps without drafts have been timed."""
        return self._verify.reaches(rows)

    def learn(
        self, nodes: float, verify_seconds: float, drafts: Mapping[str, tuple[int, float]]
    ) -> None:
        """Add a round: the nodes of all rows, its seconds; of each draft its forwards, and seconds.

        Drafts without a forward of their own take no time worth counting.
        """
        self._verify.learn(nodes, verify_seconds)
        for name, (count, seconds) in drafts.items():
            if count:
                self._curve(name).learn(count, seconds)

    def _curve(self, name: str) -> LearnedCurve:
        return self._draft.setdefault(name, LearnedCurve(lambda count: FORWARD_PRICE * count))

    def _cost(self, name: str, forwards: Callable[[int], int]) -> Callable[[float], float]:
        curve = self._curve(name)

        def draft(depth: float) -> float:
            count = forwards(math.ceil(depth))
            unit = 1.0 if curve.is_known else self._verify(1)
            return curve(count) * unit if count else 0.0

        return draft


def known_times(target: PreTrainedModel, key: Hashable, num_rows: int) -> RoundTimes:
    """What earlier generations in the same situation, drafters (`key`) and rows, have learned."""
    return cached_per_model(target, ("rounds", num_rows, machine_of(target), key), RoundTimes)


def machine_of(target: PreTrainedModel) -> tuple[Hashable, ...]:
    """What the times of forwards depend on besides the model and its inputs."""
    packed = cpu_packing_bytes() > 0
    device = execution_device(target.get_input_embeddings())
    compiled = CompiledLayers.of(target).wanted
    return device, target.dtype, torch.get_num_threads(), packed, compiled


def check_timings(timings: object) -> None:
    """Refuse what is no set of timings, and show what is expected (`OptionError`)."""
    curves: list[object] = []
    if isinstance(timings, dict) and set(timings) == {"verify", "draft"}:
        draft = timings["draft"]
        curves = [timings["verify"], *draft.values()] if isinstance(draft, dict) else []
    if not curves or not all(_is_curve(points) for points in curves):
        raise OptionError(
            f"timings={timings!r:.80} must be like {{'verify': [[1, 0.030], [16, 0.040]], 'draft': "
            "{'tree': [[1, 0.003], [4, 0.012]]}}: seconds of a forward by nodes, and of a draft by "
            "depth"
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
