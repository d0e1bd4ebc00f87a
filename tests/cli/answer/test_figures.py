"""Counts add up, and rates are taken of the sums."""

from __future__ import annotations

import io

from hf_spec.cli.answer.figures import figures, figures_table
from rich.console import Console

from hf_spec.bench.summary import total
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
    found = figures(stats(5))
    assert (found["new_tokens"], found["rounds"], found["target_forwards"]) == (9, 4, 5)
    assert found["tau"] == stats(5).tau == 1.25
    assert found["acceptance"] == 0.5
    assert found["tokens_per_second"] == 4.5


def test_a_sum() -> None:
    found = figures(total([stats(5), stats(1)]))
    assert (found["new_tokens"], found["accepted_tokens"], found["seconds"]) == (18, 6, 4.0)
    assert found["tau"] == 0.75


def test_nothing_yet() -> None:
    found = figures(total([]))
    assert found["tau"] == found["acceptance"] == found["tokens_per_second"] == 0


def test_table() -> None:
    page = io.StringIO()
    one = stats(5)
    Console(file=page, width=80).print(figures_table({"last": one, "all": total([one, one])}))
    assert "5 of 10 (50%)" in page.getvalue()
    assert "10 of 20 (50%)" in page.getvalue()
    assert "…" not in page.getvalue()
