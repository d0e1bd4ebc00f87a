"""What rounds cost, learned from the rounds of the generation themselves: no forward is extra.

A round is timed by its drafter, which is called before the target's forward and again once the
target's tokens are known on the host; nothing waits for the device on that account. What was
learned stays with the model. Until then an expectation stands in, in units of one forward.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable

from transformers import PreTrainedModel

from hf_spec.strategies.assistants import made_once
from hf_spec.strategies.auto.costs import Costs, machine_of

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
# A mean that so many others came after is forgotten: it may have been a bad moment.
LIFETIME = 100


class LearnedCurve:
    """A cost by size: means at some sizes, straight in between, else in the expected proportion.

    Args:
        expected: cost by size, up to a factor.
    """

    def __init__(self, expected: Callable[[float], float]):
        self._expected = expected
        # size -> (how many times, their mean, when the last one came)
        self._means: dict[float, tuple[int, float, int]] = {}
        self._sizes: list[float] = []
        self._count = 0

    @property
    def is_known(self) -> bool:
        """Whether anything was learned."""
        return bool(self._means)

    def __call__(self, size: float) -> float:
        """Cost of `size`, in seconds once anything was learned."""
        if not self._sizes:
            return self._expected(size)
        place = bisect_left(self._sizes, size)
        if 0 < place < len(self._sizes):
            low, high = self._sizes[place - 1 : place + 1]
            share = (size - low) / (high - low)
            return (1 - share) * self._means[low][1] + share * self._means[high][1]
        nearest = self._sizes[min(place, len(self._sizes) - 1)]
        return self._means[nearest][1] * self._expected(size) / self._expected(nearest)

    def learn(self, size: float, seconds: float) -> None:
        """Take in one measured time."""
        knot = _nearest_knot(size)
        seconds *= self._expected(knot) / self._expected(size)
        if self._sizes:
            seconds = min(seconds, LARGEST * self(knot))
        times, mean, _ = self._means.get(knot, (0, 0.0, 0))
        self._count += 1
        mean += max(1 / (times + 1), RATE) * (seconds - mean)
        self._means[knot] = times + 1, mean, self._count
        oldest = self._count - LIFETIME
        self._means = {size: known for size, known in self._means.items() if known[2] > oldest}
        self._sizes = sorted(self._means)


def _nearest_knot(size: float) -> float:
    above = bisect_right(KNOTS, size)
    return min(KNOTS[max(above - 1, 0) : above + 1], key=lambda knot: abs(math.log(knot / size)))


class RoundTimes:
    """The times of rounds with one drafter, which it may outlive: it holds nothing of it."""

    def __init__(self) -> None:
        self._verify = LearnedCurve(lambda nodes: 1.0 + NODE_PRICE * nodes)
        self._draft = LearnedCurve(lambda count: FORWARD_PRICE * count)

    def costs(self, name: str, forwards: Callable[[int], int]) -> Costs:
        """What `hf_spec.strategies.auto.choice` weighs; follows what is learned.

        Args:
            name: of the drafter's source.
            forwards: how many forwards of its own a draft of some depth takes.
        """
        return Costs(
            self._verify, {name: lambda depth: self._draft_cost(forwards(math.ceil(depth)))}
        )

    def learn(self, nodes: int, verify_seconds: float, forwards: int, draft_seconds: float) -> None:
        """Take in a round.

        Args:
            nodes: of the target's forward, all rows together.
            verify_seconds: from the draft to the target's tokens.
            forwards: of the drafter's own model; its time counts if there are any.
            draft_seconds: of the draft.
        """
        self._verify.learn(nodes, verify_seconds)
        if forwards:
            self._draft.learn(forwards, draft_seconds)

    def _draft_cost(self, count: int) -> float:
        if not count:
            return 0.0
        return self._draft(count) * (1.0 if self._draft.is_known else self._verify(1))


def known_times(target: PreTrainedModel, key: Hashable, num_rows: int) -> RoundTimes:
    """What earlier generations in the same situation have learned.

    Args:
        target: prepared for tree forwards.
        key: what tells drafters apart.
        num_rows: B.
    """
    return made_once(target, ("rounds", num_rows, machine_of(target), key), RoundTimes)
