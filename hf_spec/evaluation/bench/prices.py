"""What generations cost if a forward of one kind costs the same in all of them.

Where a machine is shared, or runs the same forward now faster and now slower, seconds do not tell
ways to generate apart that differ by a few per cent. How many forwards they take is exact, and what
a forward takes is a median over all of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Spent:
    """The forwards of a generation and their seconds.

    Attributes:
        kind: of drafts; a level of them, with what decides on the next, costs the same in a kind.
        target_forwards, target_seconds: verifications.
        draft_forwards, draft_seconds: drafted levels.
    """

    kind: str
    target_forwards: int
    target_seconds: float
    draft_forwards: int
    draft_seconds: float


def at_one_price(generations: Sequence[Spent]) -> list[float]:
    """Seconds of each with every forward at the median price of its kind; some must be drafted."""
    verify = median(one.target_seconds / one.target_forwards for one in generations)
    found: dict[str, list[float]] = defaultdict(list)
    for one in generations:
        if one.draft_forwards:
            found[one.kind].append(one.draft_seconds / one.draft_forwards)
    levels = {kind: median(prices) for kind, prices in found.items()}
    return [
        verify * one.target_forwards + levels.get(one.kind, 0.0) * one.draft_forwards
        for one in generations
    ]
