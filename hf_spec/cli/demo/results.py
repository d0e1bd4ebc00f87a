"""The tables of the demo, for a terminal and for a pipe of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from hf_spec.bench.runner import Record
from hf_spec.bench.summary import ALL, summary


@dataclass(frozen=True)
class Answer:
    """What plain `generate()` answered to a prompt.

    Attributes:
        num_tokens: Generated.
        copied: Share of them that stand in the prompt, 0 to 1.
        ended: Whether the model ended it by itself, before the limit.
    """

    num_tokens: int
    copied: float
    ended: bool


def strategies_table(records: Sequence[Record]) -> Table:
    """Return one row for plain generate() and for each strategy, all prompts together."""
    table = _table("all prompts")
    table.add_column("")
    for heading in (
        "ratio to plain\nmedian (p20-p80)",
        "total\ntime",
        "ratio\nto none",
        "tau",
        "tokens/\nforward",
        "identical",
    ):
        table.add_column(heading, justify="right")
    rows = [row for row in summary(records) if row["task"] == ALL]
    for row in rows:
        table.add_row(*_strategy_cells(row))
    return table


def prompts_table(records: Sequence[Record], answers: Mapping[str, Answer]) -> Table:
    """Return one row per prompt with the ratio of each strategy to plain generate().

    Args:
        records: Of the benchmark, plain generate() first.
        answers: By the prompt's id.
    """
    contenders = list(dict.fromkeys(record.contender for record in records))
    table = _table("ratio to plain by prompt")
    table.add_column("")
    for heading in ("tokens", "copied", *map(escape, contenders[1:])):
        table.add_column(heading, justify="right")
    for prompt, answer in answers.items():
        ratios = (
            median(r.ratio for r in records if (r.prompt, r.contender) == (prompt, contender))
            for contender in contenders[1:]
        )
        tokens = f"{answer.num_tokens}{'' if answer.ended else ', cut'}"
        cells = (tokens, f"{answer.copied:.0%}", *(f"{ratio:.2f}" for ratio in ratios))
        table.add_row(prompt, *cells)
    return table


def all_identical(records: Sequence[Record]) -> bool:
    """Return whether every output, plain or not, is that of plain generate()."""
    return all(record.identical for record in records)


def _strategy_cells(row: Mapping[str, Any]) -> list[str]:
    same = f"{row['identical']} of {row['outputs']}"
    return [
        escape(row["contender"]),
        f"{row['ratio']:.2f} ({row['ratio_p20']:.2f}-{row['ratio_p80']:.2f})",
        f"{row['total_ratio']:.2f}",
        _number(row["ratio_to_none"]),
        _number(row.get("tau")),
        f"{row['tokens_per_forward']:.2f}",
        same if row["identical"] == row["outputs"] else f"[bold red]{same}",
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE,
        collapse_padding=True,
        pad_edge=False,
    )
