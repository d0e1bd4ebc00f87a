"""What came out of the demo: its tables, for a terminal and for a pipe of 80 columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rich import box
from rich.markup import escape
from rich.table import Table

from hf_spec.bench.runner import Record
from hf_spec.bench.summary import ALL, Summary, summary


@dataclass(frozen=True)
class Answer:
    """What plain `generate()` answered: tokens, share copied from the prompt, ended by itself."""

    num_tokens: int
    copied: float
    ended: bool


# Shorter runs of tokens are shared by any two texts on the same subject.
COPIED_NGRAM_LEN = 3
COLUMNS: dict[str, Callable[[Summary], str]] = {
    "": lambda row: escape(row["contender"]),
    "ratio to plain\nmedian (p20-p80)": lambda row: (
        f"{row['ratio']:.2f} ({row['ratio_p20']:.2f}-{row['ratio_p80']:.2f})"
    ),
    "total\ntime": lambda row: _number(row["total_ratio"]),
    "ratio\nto none": lambda row: _number(row["ratio_to_none"]),
    "tau": lambda row: _number(row.get("tau")),
    "tokens/\nforward": lambda row: _number(row["tokens_per_forward"]),
    "identical": lambda row: (
        f"{'' if row['identical'] == row['outputs'] else '[bold red]'}"
        f"{row['identical']} of {row['outputs']}"
    ),
}


def copied_share(prompt_ids: Sequence[int], output_ids: Sequence[int]) -> float:
    """The share of output tokens, 0 to 1, in runs of three or more that the prompt has too."""
    length = COPIED_NGRAM_LEN
    in_prompt = set(zip(*(prompt_ids[start:] for start in range(length)), strict=False))
    copied: set[int] = set()
    for start in range(len(output_ids) - length + 1):
        if tuple(output_ids[start : start + length]) in in_prompt:
            copied.update(range(start, start + length))
    return len(copied) / max(len(output_ids), 1)


def strategies_table(records: Sequence[Record]) -> Table:
    """One row for plain generate() and for each strategy, all prompts together."""
    table = _table("all prompts", COLUMNS)
    for row in summary(records):
        if row["task"] == ALL:
            table.add_row(*(cell(row) for cell in COLUMNS.values()))
    return table


def prompts_table(records: Sequence[Record], answers: Mapping[str, Answer]) -> Table:
    """One row per prompt, with its answer and the ratio of each strategy to plain generate()."""
    ratios: dict[tuple[str, str], list[float]] = {}
    for record in records:
        ratios.setdefault((record.prompt, record.contender), []).append(record.ratio)
    strategies = list(dict.fromkeys(contender for _, contender in ratios))[1:]
    table = _table("ratio to plain by prompt", ["", "tokens", "copied", *map(escape, strategies)])
    for prompt, answer in answers.items():
        tokens = f"{answer.num_tokens}{'' if answer.ended else ', cut'}"
        cells = (f"{median(ratios[prompt, name]):.2f}" for name in strategies)
        table.add_row(prompt, tokens, f"{answer.copied:.0%}", *cells)
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(title: str, headings: Iterable[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.title_justify, table.title_style = "left", "bold"
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    return table
