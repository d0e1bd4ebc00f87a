"""Figures on held-back answers that several methods report."""

from __future__ import annotations

from collections.abc import Sequence


def by_slot(right: Sequence[Sequence[bool]], length: int | None = None) -> dict[str, float]:
    """How often each token of a draft is right.

    Args:
        right: per draft whether its tokens are, in order; drafts may be cut short.
        length: of a whole draft; the longest there is by default.

    Returns:
        "slot_j", the share of right tokens among those at place j, from 1; "slot_j_given", among
        those whose tokens before it are right. 0 where there are none.
    """
    figures: dict[str, float] = {}
    for slot in range(max(map(len, right), default=0) if length is None else length):
        seen = [row for row in right if len(row) > slot]
        before = [row for row in seen if all(row[:slot])]
        figures[f"slot_{slot + 1}"] = _share([row[slot] for row in seen])
        figures[f"slot_{slot + 1}_given"] = _share([row[slot] for row in before])
    return figures


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(len(flags), 1)
