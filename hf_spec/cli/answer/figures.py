"""Counts of generations as commands show and write them."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.table import Table

from hf_spec.outputs import SpecStats


def figures(stats: SpecStats) -> dict[str, Any]:
    """JSON values: counts and times of one or more generations, and rates of them.

    `rounds` are drafts that were judged, `acceptance` is the share of drafted tokens accepted.
    """
    seconds = stats.draft_seconds + stats.verify_seconds + stats.other_seconds
    return {
        "new_tokens": stats.new_tokens,
        "rounds": sum(row.target_forwards for row in stats.rows),
        "target_forwards": stats.target_forwards,
        "draft_forwards": stats.draft_forwards,
        "drafted_tokens": stats.drafted_tokens,
        "accepted_tokens": stats.accepted_tokens,
        "draft_seconds": stats.draft_seconds,
        "verify_seconds": stats.verify_seconds,
        "seconds": seconds,
        "tau": stats.tau,
        "acceptance": stats.accepted_tokens / max(stats.drafted_tokens, 1),
        "tokens_per_second": stats.new_tokens / seconds if seconds else 0.0,
    }


# Label and form of a line, filled from `figures`.
LINES = {
    "new tokens": "{new_tokens}",
    "tokens per second": "{tokens_per_second:.1f}",
    "target forwards": "{target_forwards}",
    "draft forwards": "{draft_forwards}",
    "draft tokens accepted": "{accepted_tokens} of {drafted_tokens} ({acceptance:.0%})",
    "tau, accepted per round": "{tau:.2f}",
    "seconds drafting + verifying": "{draft_seconds:.2f} + {verify_seconds:.2f}",
    "seconds in all": "{seconds:.2f}",
}


def figures_table(columns: dict[str, SpecStats]) -> Table:
    """A table with one column for each of `columns`."""
    table = Table(box=box.SIMPLE)
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    found = [figures(stats) for stats in columns.values()]
    for label, form in LINES.items():
        table.add_row(label, *(form.format(**one) for one in found))
    return table
