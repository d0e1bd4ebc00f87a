"""What speculation should gain by theory: the improvement factor, and the cost ratio it needs."""

from __future__ import annotations

from hf_spec.common.outputs import SpecStats


def improvement_factor(acceptance_rate: float, draft_tokens: int, cost_ratio: float) -> float:
    """Expected speed of a chain of constant length relative to plain decoding.

    (1 - a^(n+1)) / ((1 - a) (n c + 1)): tokens per round over the cost of a round, if every draft
    token is accepted with the same probability and verification costs as much as one token
    (Leviathan et al. 2023, arXiv 2211.17192; eq. 1 of Mamou et al. 2024, arXiv 2405.04304).

    Args:
        acceptance_rate: a, probability that a draft token is accepted after accepted ones.
        draft_tokens: n, tokens drafted in every round.
        cost_ratio: c, time of a draft forward over that of a target forward; see `cost_ratio`.

    Raises:
        ValueError: if an argument is out of range.
    """
    if not 0 <= acceptance_rate <= 1 or draft_tokens < 0 or cost_ratio < 0:
        raise ValueError(
            f"acceptance_rate={acceptance_rate} must be between 0 and 1, draft_tokens="
            f"{draft_tokens} and cost_ratio={cost_ratio} not negative"
        )
    # The sum of a geometric series, written out: exact at 1 too.
    tokens = sum(acceptance_rate**accepted for accepted in range(draft_tokens + 1))
    return tokens / (draft_tokens * cost_ratio + 1)


def cost_ratio(stats: SpecStats) -> float:
    """Measured time per draft forward over measured time per target forward.

    The prompt's forwards are among them, and the drafter's own bookkeeping counts as drafting.

    Raises:
        ValueError: if nothing was drafted or verified.
    """
    if not stats.draft_forwards or not stats.target_forwards or not stats.verify_seconds:
        raise ValueError("the generation has no draft or no target forwards to compare")
    per_draft = stats.draft_seconds / stats.draft_forwards
    return per_draft / (stats.verify_seconds / stats.target_forwards)
