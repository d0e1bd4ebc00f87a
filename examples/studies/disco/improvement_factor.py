"""Theoretical speedup of speculative decoding: the improvement factor and its cost ratio."""

from __future__ import annotations

from hf_spec.common.outputs import SpecStats


def improvement_factor(acceptance_rate: float, draft_tokens: int, cost_ratio: float) -> float:
    """Return the expected speedup of draft chains of constant length over plain decoding.

    (1 - a^(n+1)) / ((1 - a) (n c + 1)): tokens per round divided by the cost of a round, if every
    draft token has the same acceptance probability and verification costs as much as one token
    (Leviathan et al. 2023, arXiv 2211.17192; eq. 1 of Mamou et al. 2024, arXiv 2405.04304).

    Args:
        acceptance_rate: a, acceptance probability of a draft token whose prefix is accepted.
        draft_tokens: n, tokens drafted in every round.
        cost_ratio: c, time of a draft forward pass over that of a target forward pass.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0 <= acceptance_rate <= 1 or draft_tokens < 0 or cost_ratio < 0:
        raise ValueError(
            f"acceptance_rate={acceptance_rate} must be between 0 and 1, draft_tokens="
            f"{draft_tokens} and cost_ratio={cost_ratio} not negative"
        )
    # Sum the geometric series explicitly, so the result is also exact for a rate of 1.
    tokens = sum(acceptance_rate**accepted for accepted in range(draft_tokens + 1))
    return tokens / (draft_tokens * cost_ratio + 1)


def cost_ratio(stats: SpecStats) -> float:
    """Return the measured time per draft forward pass over that per target forward pass.

    Prefill is included, and the bookkeeping of the drafter counts as drafting.

    Raises:
        ValueError: if nothing was drafted or verified.
    """
    if not stats.draft_forwards or not stats.target_forwards or not stats.verify_seconds:
        raise ValueError("the generation has no draft or no target forwards to compare")
    per_draft = stats.draft_seconds / stats.draft_forwards
    return per_draft / (stats.verify_seconds / stats.target_forwards)
