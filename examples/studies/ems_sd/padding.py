"""Padding needed to keep the rows of a batch aligned, by a model of acceptance.

In the model of Ni et al. 2024 (arXiv 2405.07542, Appendix B), every next token is accepted with
probability p, independently for each row and position. A row then gains X tokens in a step, at most
`cap` (the draft and the bonus token), with

    P(X >= k) = p^(k-1),   E[X] = sum_k p^(k-1),   E[max of B rows] = sum_k 1 - (1 - p^(k-1))^B

over k = 1 .. cap. The padding ratio is (E[max] - E[X]) / E[X], equation 10. The paper estimates it
by simulation; with a cap, the sums are finite.
"""

from __future__ import annotations


def expected_gain(accuracy: float, batch_size: int, cap: int) -> float:
    """Return the expected maximum of tokens gained in a step over the rows; E[X] for one row.

    Args:
        accuracy: p, probability that the next token of a draft is accepted.
        batch_size: B.
        cap: maximum number of tokens that a row can gain.
    """
    reach = [accuracy**level for level in range(cap)]
    return sum(1 - (1 - chance) ** batch_size for chance in reach)


def padding_ratio(accuracy: float, batch_size: int, cap: int) -> float:
    """Return the expected padding per gained token for rows with equal acceptance."""
    mean = expected_gain(accuracy, 1, cap)
    return (expected_gain(accuracy, batch_size, cap) - mean) / mean


def accuracy_for(gain: float, cap: int) -> float:
    """Return the p for which the mean gain of a row is `gain` tokens per step.

    Args:
        gain: mean tokens per step, clamped to the range from 1 to `cap`.
        cap: maximum number of tokens that a row can gain.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_gain(middle, 1, cap) < gain else (low, middle)
    return (low + high) / 2
