"""Chi-square test of sampled tokens against a known distribution, and its power.

Continuations are divided into *cells*: every continuation of the given length that is likely enough
to be expected several times, and for each prefix of one a cell for all others. Pearson's chi-square
compares observed counts with exact probabilities.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

# Tokens after a prompt.
Path = tuple[int, ...]

# M paths of one length -> (M, V) float64 probabilities of the next token.
NextProbs = Callable[[Sequence[Path]], Tensor]

# With fewer expected counts in a cell, chi-square rejects too often.
MIN_EXPECTED = 5

# Smaller probabilities are rounding errors of 0.
IMPOSSIBLE = 1e-12


@dataclass(frozen=True)
class Cells:
    """Partition of all continuations of `steps` tokens, or fewer where a sequence ends.

    `leaves` has the probabilities of complete continuations, `rests` for each prefix that of all
    continuations without a longer entry. `possible` is (V,) bool: the tokens that may follow it.
    """

    steps: int
    leaves: dict[Path, float] = field(default_factory=dict)
    rests: dict[Path, float] = field(default_factory=dict)
    possible: dict[Path, Tensor] = field(default_factory=dict)

    def locate(self, continuation: Path) -> tuple[Path, bool]:
        """Return the leaf or prefix of a continuation, and False if its probability is 0."""
        for length in range(self.steps):
            path, longer = continuation[:length], continuation[: length + 1]
            if not self.possible[path][continuation[length]]:
                return path, False
            if longer in self.leaves:
                return longer, True
            if longer not in self.rests:
                return path, True
        raise AssertionError(f"{continuation} is longer than its cell")


@dataclass(frozen=True)
class Comparison:
    """Chi-square with `cells - 1` degrees of freedom; `impossible` draws had probability 0."""

    draws: int
    cells: int
    statistic: float
    impossible: int = 0

    @property
    def p_value(self) -> float:
        """Probability of a statistic at least this large under the expected distribution."""
        if self.impossible:
            return 0.0
        return chi_square_tail(self.statistic, self.cells - 1)


def divide(
    next_probs: NextProbs, steps: int, min_probability: float, ends: Collection[int] = ()
) -> Cells:
    """Return the cells of a model's continuations of `steps` tokens.

    `next_probs` is called once per step; `min_probability` is the minimum of a separate cell, and
    `ends` are end-of-sequence tokens.
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
    """Return the chi-square of drawn continuations of `cells.steps` tokens or to their end."""
    located = [cells.locate(continuation) for continuation in continuations]
    counts = Counter(path for path, _ in located)
    # No path is both a leaf and a prefix.
    probs = {**cells.leaves, **cells.rests}
    pairs = ((prob * len(located), counts[path]) for path, prob in probs.items())
    return chi_square(pairs, sum(not possible for _, possible in located))


def chi_square(cells: Iterable[tuple[float, int]], impossible: int = 0) -> Comparison:
    """Return the chi-square of (expected, observed) pairs, `impossible` draws among them."""
    merged = merge_rare(cells)
    statistic = sum((observed - expected) ** 2 / expected for expected, observed in merged)
    draws = sum(observed for _, observed in merged)
    return Comparison(draws, len(merged), statistic, impossible)


def merge_rare(cells: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Merge (expected, observed) pairs below `MIN_EXPECTED` into one."""
    ordered = sorted(cells, reverse=True)
    frequent = [cell for cell in ordered if cell[0] >= MIN_EXPECTED]
    rare = ordered[len(frequent) :]
    while frequent and rare and sum(expected for expected, _ in rare) < MIN_EXPECTED:
        rare.append(frequent.pop())
    if rare:
        frequent.append((sum(e for e, _ in rare), sum(observed for _, observed in rare)))
    return frequent


def chi_square_tail(statistic: float, freedom: float) -> float:
    """Return the probability that chi-square with `freedom` degrees exceeds `statistic`."""
    if freedom <= 0:
        return 1.0
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def power(noncentrality: float, freedom: int, significance: float) -> float:
    """Return the probability of detecting a bias p' of noncentrality n * sum((p' - p)**2 / p)."""
    # The statistic that is exceeded with probability `significance`.
    critical = _bisect(lambda x: chi_square_tail(x, freedom) > significance, freedom + 10.0)
    limit = torch.tensor(critical / 2, dtype=torch.float64)
    mean = noncentrality / 2
    # The noncentral distribution is a Poisson mixture of central ones.
    count = torch.arange(int(mean + 12 * math.sqrt(mean + 1)) + 20, dtype=torch.float64)
    weights = torch.exp(torch.xlogy(count, mean) - mean - torch.lgamma(count + 1))
    tails = torch.special.gammaincc(freedom / 2 + count, limit.expand_as(count))
    return float((weights * tails).sum())


def detectable_share(draws: int, freedom: int, significance: float, wanted: float = 0.99) -> float:
    """Return the smallest share of probability whose shift between cells is always detected.

    Shifting a share d has a noncentrality of at least 4 * n * d**2 (Cauchy-Schwarz; equality if it
    moves from one half of the probability to the other). The shift is detected with probability
    `wanted`. A result of 1 means that no bias is certain to be detected.
    """
    if not draws or freedom <= 0:
        return 1.0
    needed = _bisect(lambda x: power(x, freedom, significance) < wanted, 10.0)
    return min(math.sqrt(needed / (4 * draws)), 1.0)


def _bisect(below: Callable[[float], bool], start: float) -> float:
    """Return the value above 0 at which `below` turns False."""
    low, high = 0.0, start
    while below(high):
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if below(middle) else (low, middle)
    return high
