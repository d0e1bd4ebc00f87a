"""Counts of generations as commands show and write them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from rich import box
from rich.table import Table

from hf_spec.outputs import SpecStats


@dataclass(frozen=True)
class Figures:
    """Counts and times of one or more generations; `+` adds them up.

    Attributes:
        new_tokens, target_forwards, draft_forwards, drafted_tokens, accepted_tokens: as in
            `SpecStats`.
        rounds: drafts that were judged.
        draft_seconds, verify_seconds, seconds: of drafting, of the target's forwards, of all.
    """

    new_tokens: int = 0
    rounds: int = 0
    target_forwards: int = 0
    draft_forwards: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    seconds: float = 0.0

    @classmethod
    def of(cls, stats: SpecStats) -> Figures:
        """Those of one generation."""
        shared = {field.name for field in fields(cls)} - {"rounds", "seconds"}
        return cls(
            rounds=sum(row.target_forwards for row in stats.rows),
            seconds=stats.draft_seconds + stats.verify_seconds + stats.other_seconds,
            **{name: getattr(stats, name) for name in shared},
        )

    def __add__(self, other: Figures) -> Figures:
        mine, theirs = asdict(self), asdict(other)
        return Figures(**{name: mine[name] + theirs[name] for name in mine})

    @property
    def tau(self) -> float:
        """Accepted draft tokens per round, without the bonus token."""
        return self.accepted_tokens / max(self.rounds, 1)

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted."""
        return self.accepted_tokens / max(self.drafted_tokens, 1)

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second; 0 before there are any."""
        return self.new_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON values."""
        rates = ("tau", "acceptance", "tokens_per_second")
        return {**asdict(self), **{name: getattr(self, name) for name in rates}}


def figures_table(columns: dict[str, Figures]) -> Table:
    """Return a table with one column for each of `columns`."""
    table = Table(box=box.SIMPLE)
    for name in ("", *columns):
        table.add_column(name, justify="right" if name else "left")
    found = columns.values()
    for label, cells in (
        ("new tokens", [f"{one.new_tokens}" for one in found]),
        ("tokens per second", [f"{one.tokens_per_second:.1f}" for one in found]),
        ("target forwards", [f"{one.target_forwards}" for one in found]),
        ("draft forwards", [f"{one.draft_forwards}" for one in found]),
        (
            "draft tokens accepted",
            [
                f"{one.accepted_tokens} of {one.drafted_tokens} ({one.acceptance:.0%})"
                for one in found
            ],
        ),
        ("tau, accepted per round", [f"{one.tau:.2f}" for one in found]),
        (
            "seconds drafting + verifying",
            [f"{one.draft_seconds:.2f} + {one.verify_seconds:.2f}" for one in found],
        ),
        ("seconds in all", [f"{one.seconds:.2f}" for one in found]),
    ):
        table.add_row(label, *cells)
    return table
