"""How much padding rows of one batch need if they must stay aligned, by a model of acceptance.

The model of Ni et al. 2024 (arXiv 2405.07542, Appendix B): every next token is right with
probability p, for each row and place alone, so that a row gains X tokens in a step, at most `cap`
(the draft and one more), with

    P(X >= k) = p^(k-1),   E[X] = sum_k p^(k-1),   E[max of B rows] = sum_k 1 - (1 - p^(k-1))^B

over k = 1 .. cap. The padding ratio is (E[max] - E[X]) / E[X], equation 10. The paper estimates it
by simulation; with a cap the sums are finite.
"""

from __future__ import annotations


def expected_gain(accuracy: float, batch_size: int, cap: int) -> float:
    """Expected tokens gained in a step by the row of a batch that gains most; E[X] for one row.

    Args:
        accuracy: p, probability that the next token of a draft is right.
        batch_size: B.
        cap: most tokens that a row can gain.
    """
    reach = [accuracy**place for place in range(cap)]
    return sum(1 - (1 - chance) ** batch_size for chance in reach)


def padding_ratio(accuracy: float, batch_size: int, cap: int) -> float:
    """Expected padding per token gained, of rows that accept alike."""
    mean = expected_gain(accuracy, 1, cap)
    return (expected_gain(accuracy, batch_size, cap) - mean) / mean


def accuracy_for(gain: float, cap: int) -> float:
    """The p for which a row gains so many tokens a step on average.

    Args:
        gain: between 1 and `cap`; what lies beyond is taken for the nearer of them.
        cap: most tokens that a row can gain.
    """
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_gain(middle, 1, cap) < gain else (low, middle)
    return (low + high) / 2
