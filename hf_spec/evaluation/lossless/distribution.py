"""Whether sampled tokens follow a known distribution: cells, chi-square, and what it can find.

What may be generated first is divided into *cells*: every continuation of the given length that is
likely enough to be expected several times, and for each beginning of one "anything else". Observed
counts are compared with exact probabilities by Pearson's chi-square; its power against a bias is
that of the noncentral distribution with n * sum((p' - p)**2 / p).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Tokens that follow a prompt.
Path = tuple[int, ...]

# Paths of one length -> (M, V) float64, what follows each.
NextProbs = Callable[[Sequence[Path]], Tensor]

# A cell that is expected less often than this makes chi-square too eager.
MIN_EXPECTED = 5

# Probabilities below this are rounding, not chance.
IMPOSSIBLE = 1e-12


@dataclass(frozen=True)
class Cells:
    """A division of all continuations of `steps` tokens, or fewer where one ends.

    Attributes:
        leaves: whole continuations with their probability.
        rests: beginnings, with the probability that something else follows than a longer entry.
        possible: of each beginning, which tokens may follow it, (V,) bool.
    """

    steps: int
    leaves: dict[Path, float] = field(default_factory=dict)
    rests: dict[Path, float] = field(default_factory=dict)
    possible: dict[Path, Tensor] = field(default_factory=dict)

    def place(self, continuation: Path) -> tuple[Path, bool]:
        """The leaf or beginning that a continuation belongs to, and whether it may come at all."""
        for length in range(self.steps):
            path = continuation[:length]
            token = continuation[length]
            if not self.possible[path][token]:
                return path, False
            longer = continuation[: length + 1]
            if longer in self.leaves:
                return longer, True
            if longer not in self.rests:
                return path, True
        raise AssertionError(f"{continuation} is longer than its own cell")


@dataclass(frozen=True)
class Comparison:
    """Chi-square of counts against their expectation, with `cells - 1` degrees of freedom.

    `impossible` are draws that have probability 0.
    """

    draws: int
    cells: int
    statistic: float
    impossible: int = 0

    @property
    def p_value(self) -> float:
        """Probability of a statistic as large as this if the distribution is right."""
        if self.impossible:
            return 0.0
        return chi_square_tail(self.statistic, self.cells - 1)


def divide(
    next_probs: NextProbs, steps: int, min_probability: float, ends: Collection[int] = ()
) -> Cells:
    """Find the cells of a model's continuations of `steps` tokens; nothing follows `ends`.

    `next_probs` is called once per step; `min_probability` is that of a cell of its own.
    """
    cells = Cells(steps)
    level: dict[Path, float] = {(): 1.0}
    for step in range(steps):
        if not level:
            break
        following: dict[Path, float] = {}
        for (path, reach), probs in zip(level.items(), next_probs(list(level)), strict=True):
            joint = reach * probs.double()
            likely = (joint >= min_probability).nonzero()[:, 0].tolist()
            for token in likely:
                last = step == steps - 1 or token in ends
                (cells.leaves if last else following)[(*path, token)] = float(joint[token])
            cells.possible[path] = (probs >= IMPOSSIBLE).cpu()
            joint[likely] = 0
            cells.rests[path] = float(joint.sum())
        level = following
    return cells


def compare(cells: Cells, continuations: Iterable[Path]) -> Comparison:
    """Chi-square of drawn continuations, each of `cells.steps` tokens or ended before."""
    places = [cells.place(continuation) for continuation in continuations]
    counts = Counter(path for path, _ in places)
    # Leaves and beginnings have names of their own: one is never a part of the other.
    probs = {**cells.leaves, **cells.rests}
    found = ((prob * len(places), counts[path]) for path, prob in probs.items())
    return chi_square(found, sum(not possible for _, possible in places))


def chi_square(found: Iterable[tuple[float, int]], impossible: int = 0) -> Comparison:
    """Compare how many were expected in each cell with how many there are, `impossible` of them."""
    merged = merge_rare(found)
    statistic = sum((seen - expected) ** 2 / expected for expected, seen in merged)
    return Comparison(sum(seen for _, seen in merged), len(merged), statistic, impossible)


def merge_rare(cells: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Put (expected, observed) pairs that are expected too rarely together into one."""
    ordered = sorted(cells, reverse=True)
    kept = [cell for cell in ordered if cell[0] >= MIN_EXPECTED]
    rare = ordered[len(kept) :]
    while kept and rare and sum(expected for expected, _ in rare) < MIN_EXPECTED:
        rare.append(kept.pop())
    if rare:
        kept.append((sum(e for e, _ in rare), sum(seen for _, seen in rare)))
    return kept


def chi_square_tail(statistic: float, freedom: float) -> float:
    """Probability that chi-square with `freedom` degrees of freedom exceeds `statistic`."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def chi_square_limit(significance: float, freedom: float) -> float:
    """The statistic that is exceeded with probability `significance`."""
    return _bisect(lambda x: chi_square_tail(x, freedom) > significance, freedom + 10.0)


def power(noncentrality: float, freedom: int, significance: float) -> float:
    """Probability that a test finds a bias p' of `noncentrality` n * sum((p' - p)**2 / p)."""
    limit = torch.tensor(chi_square_limit(significance, freedom) / 2, dtype=torch.float64)
    mean = noncentrality / 2
    # The noncentral distribution is a Poisson mixture of central ones.
    count = torch.arange(int(mean + 12 * math.sqrt(mean + 1)) + 20, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(count, mean) - mean - torch.lgamma(count + 1))
    tails = torch.special.gammaincc(freedom / 2 + count, limit.expand_as(count))
    return float((weights * tails).sum())


def detectable_share(draws: int, freedom: int, significance: float, wanted: float = 0.99) -> float:
    """The least share of probability that no bias can move between cells without being found.

    Moving a share d has a noncentrality of at least 4 * n * d**2 (Cauchy-Schwarz, reached where it
    goes from one half of the probability to the other). It is found with the probability `wanted`;
    1 means a test that finds nothing for certain.
    """
    if not draws or freedom <= 0:
        return 1.0
    needed = _bisect(lambda x: power(x, freedom, significance) < wanted, 10.0)
    return min(math.sqrt(needed / (4 * draws)), 1.0)


def _bisect(below: Callable[[float], bool], start: float) -> float:
    """The place above 0 where `below` turns False."""
    low, high = 0.0, start
    while below(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
