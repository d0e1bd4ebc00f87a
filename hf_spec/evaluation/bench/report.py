"""Tables of a benchmark.

`python -m hf_spec.evaluation.bench.report RESULTS.json` prints the tables of a file written by
`hf-spec bench --out`. `--plots FOLDER` draws its plots too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_spec.common.tables import Table
from hf_spec.evaluation.bench import plots
from hf_spec.evaluation.bench.profiling import PARTS
from hf_spec.evaluation.bench.summary import ALL, IDLE, Summary, notice

# Text after `notice` above the tables.
SYNTHETIC = (
    ": drafts of synthetic contenders are plain outputs with errors. No drafter made them, and "
    "their drafting takes no time."
)
# Draft positions whose acceptance the tables show; plots show all.
SHOWN_POSITIONS = 5
# Column heading -> cell of a contender.
SPEEDS: dict[str, Callable[[Summary], str]] = {
    "": lambda row: row["contender"],
    "ratio to plain, median (p20 - p80)": lambda row: _with_spread(row, "ratio", 2),
    f"ratio to {IDLE}": lambda row: _number(row.get("ratio_to_none"), 2),
    "total time ratio": lambda row: _number(row["total_ratio"], 2),
    "tokens/s, median (p20 - p80)": lambda row: _with_spread(row, "tokens_per_second", 1),
    "tau": lambda row: _number(row.get("tau"), 2),
    "tokens / target forward": lambda row: _number(row["tokens_per_forward"], 2),
    "peak memory, MiB": lambda row: _number(row["peak_bytes"] and row["peak_bytes"] / 2**20, 0),
    "identical": lambda row: _count(row["identical"], row["outputs"]),
}
DRAFTS: dict[str, Callable[[Summary], str]] = {
    "per generation": lambda row: row["contender"],
    f"acceptance at position 1 to {SHOWN_POSITIONS}": lambda row: " ".join(
        f"{share:.2f}" for share in row["acceptance_by_position"][:SHOWN_POSITIONS]
    ),
    "alpha": lambda row: _number(row.get("alpha"), 2),
    "drafted": lambda row: f"{row['drafted_tokens']:.1f}",
    "drafted, not sent included": lambda row: f"{row['draft_nodes']:.1f}",
    "draft forwards": lambda row: f"{row['draft_forwards']:.1f}",
    "rounds with a merged token accepted": lambda row: f"{row['rounds_with_merged_accepted']:.1%}",
    "draft / verify / other time": lambda row: (
        f"{100 * row['draft_share']:.0f} / {100 * row['verify_share']:.0f} / "
        f"{100 * (1 - row['draft_share'] - row['verify_share']):.0f} %"
    ),
}


def sections(results: Mapping[str, Any]) -> dict[str, list[Table]]:
    """Return the tables (speeds, tasks, drafts, parts of a step) by title, one per batch size."""
    sections_by_title = {}
    for size in dict.fromkeys(row["batch_size"] for row in results["summary"]):
        rows = [row for row in results["summary"] if row["batch_size"] == size]
        overall = [row for row in rows if row["task"] == ALL]
        profiles = [p for p in results.get("profiles", []) if p["batch_size"] == size]
        drafting = Table.of(DRAFTS, [row for row in overall if row.get("drafted_tokens")])
        tables = (Table.of(SPEEDS, overall), _by_task(rows), drafting, _profile(profiles))
        sections_by_title[f"batch size {size}"] = [table for table in tables if table.rows]
    return sections_by_title


def markdown(results: Mapping[str, Any]) -> str:
    """Return the tables as Markdown."""
    return _pages(results, "**{}**", "### {}", Table.markdown)


def text(results: Mapping[str, Any]) -> str:
    """Return the tables as plain text."""
    return _pages(results, "{}", "{}", Table.text)


def _pages(
    results: Mapping[str, Any], warning: str, title: str, render: Callable[[Table], str]
) -> str:
    synthetic = notice(results)
    parts = [warning.format(synthetic) + SYNTHETIC] if synthetic else []
    for name, tables in sections(results).items():
        parts += [title.format(name), *map(render, tables)]
    return "\n\n".join(parts)


def _by_task(rows: Sequence[Summary]) -> Table:
    """Return speedups and identical outputs by task; mixed batches have only the outputs."""
    by_key = {(row["contender"], row["task"]): row for row in rows}
    overall = [row for row in rows if row["task"] == ALL]
    tasks = sorted({task for row in overall for task in row["identical_by_task"] or []})
    tasks = tasks or sorted({row["task"] for row in rows} - {ALL})

    def cell(row: Summary, task: str) -> str:
        of_task = by_key.get((row["contender"], task))
        ratio = [f"{of_task['ratio']:.2f}"] if of_task else []
        counts = row["identical_by_task"]
        return " ".join([*ratio, *([f"({_count(*counts[task])})"] if counts else [])])

    head = ["ratio (identical outputs) by task", *tasks]
    return Table(head, [[row["contender"], *(cell(row, t) for t in tasks)] for row in overall])


def _profile(profiles: Sequence[Mapping[str, Any]]) -> Table:
    parts = [part for part in PARTS if any(part in profile["seconds"] for profile in profiles)]
    rows = []
    for profile in profiles if parts else ():
        total = sum(profile["seconds"].values())
        shares = (profile["seconds"].get(part, 0.0) / total for part in parts)
        rows.append([profile["contender"], *(f"{100 * share:.1f}" for share in shares)])
    return Table(["share of the time, %", *parts], rows)


def _with_spread(row: Summary, figure: str, digits: int) -> str:
    low, middle, high = (row[f"{figure}{end}"] for end in ("_p20", "", "_p80"))
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(same: int | None, outputs: int) -> str:
    return "-" if same is None else f"{same} of {outputs}"


def main(argv: list[str] | None = None) -> None:
    """Print the tables of a results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file of hf-spec bench --out")
    parser.add_argument("--plots", type=Path, help="folder for its plots")
    options = parser.parse_args(argv)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    print(markdown(results))  # noqa: T201 - the command's result
    if options.plots:
        plots.draw(results, options.plots)


if __name__ == "__main__":
    main()
