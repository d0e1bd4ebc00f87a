"""Counts add up, and rates are taken of the sums."""

from __future__ import annotations

import io

from rich.console import Console

from hf_spec.cli.answer.figures import Figures, figures_table
from hf_spec.outputs import RowStats, SpecStats


def stats(accepted: int) -> SpecStats:
    row = RowStats(target_forwards=4, drafted_tokens=10, accepted_tokens=accepted, new_tokens=9)
    return SpecStats(
        [row],
        target_forwards=5,
        draft_forwards=3,
        draft_seconds=0.5,
        verify_seconds=1.0,
        other_seconds=0.5,
    )


def test_one_generation() -> None:
    figures = Figures.of(stats(5))
    assert (figures.new_tokens, figures.rounds, figures.target_forwards) == (9, 4, 5)
    assert figures.tau == stats(5).tau == 1.25
    assert figures.acceptance == 0.5
    assert figures.tokens_per_second == 4.5
    assert figures.to_dict()["tau"] == 1.25


def test_a_sum() -> None:
    both = Figures.of(stats(5)) + Figures.of(stats(1))
    assert (both.new_tokens, both.accepted_tokens, both.seconds) == (18, 6, 4.0)
    assert both.tau == 0.75


def test_nothing_yet() -> None:
    assert Figures().tau == Figures().acceptance == Figures().tokens_per_second == 0


def test_table() -> None:
    page = io.StringIO()
    one = Figures.of(stats(5))
    Console(file=page, width=80).print(figures_table({"last": one, "all": one + one}))
    assert "5 of 10 (50%)" in page.getvalue()
    assert "10 of 20 (50%)" in page.getvalue()
    assert "…" not in page.getvalue()
