"""Tables from benchmark records: medians with spread, never a single run.

Run as `python -m hf_spec.bench.report RESULTS.json` to print the tables of a file that
`hf-spec bench --out` wrote; with `--plots FOLDER` its plots are drawn too.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hf_spec.bench.profiling import PARTS
from hf_spec.bench.runner import Record, Row, StrategyStats
from hf_spec.bench.tables import Section, Table

ALL = "all"
# What follows `notice` where it stands above tables.
SYNTHETIC = (
    ": the drafts of the contenders called synthetic are plain answers with errors, which no "
    "drafter made and whose drafting takes no time."
)
# The engine without drafts.
IDLE = "none"
# Positions of a draft whose acceptance tables show; plots show all.
SHOWN_POSITIONS = 5
Summary = dict[str, Any]


def per_prompt(records: Iterable[Record], figure: str = "ratio") -> dict[str, float]:
    """Prompt id -> median of a figure of the records over its repetitions."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        values[record.prompt].append(getattr(record, figure))
    return {prompt: median(found) for prompt, found in values.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """20th percentile, median and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = quantiles(values, n=5, method="inclusive")
    return fifths[0], median(values), fifths[3]


def summary(records: Sequence[Record]) -> list[Summary]:
    """One row per batch size, contender and task, and one for all tasks (`task` is "all").

    A batch of prompts of several tasks counts for "all" and "mixed"; its outputs are still counted
    by task in `identical_by_task`.
    """
    groups: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        for task in (record.task, ALL):
            groups[record.batch_size, record.contender, task].append(record)
    idle = {_occasion(r): r.ratio for r in records if r.contender == IDLE}
    return [
        {**_row(*key, group), "ratio_to_none": _ratio_to(idle, group)}
        for key, group in groups.items()
    ]


def _occasion(record: Record) -> tuple[int, str, int]:
    return record.batch_size, record.prompt, record.repeat


def _ratio_to(
    others: Mapping[tuple[int, str, int], float], group: Sequence[Record]
) -> float | None:
    """The median over prompts of the speed relative to `others` in the same repetition."""
    found: dict[str, list[float]] = defaultdict(list)
    for record in group:
        if _occasion(record) not in others:
            return None
        found[record.prompt].append(record.ratio / others[_occasion(record)])
    return median(median(ratios) for ratios in found.values())


def _row(batch_size: int, contender: str, task: str, group: Sequence[Record]) -> Summary:
    by_task = _identical(group)
    first = [record for record in group if record.repeat == 0]
    tokens = sum(record.new_tokens for record in first)
    forwards = [record.target_forwards for record in first if record.target_forwards is not None]
    counted = len(forwards) == len(first)
    peaks = [record.peak_bytes for record in group if record.peak_bytes is not None]
    row: Summary = {
        "batch_size": batch_size,
        "contender": contender,
        "task": task,
        "batches": len(first),
        **_spread_of(group, "ratio"),
        **_spread_of(group, "tokens_per_second"),
        "total_ratio": sum(r.plain_seconds for r in group) / sum(r.seconds for r in group),
        "tokens_per_forward": tokens / sum(forwards) / batch_size if counted else None,
        "peak_bytes": max(peaks, default=None),
        "identical": None if by_task is None else sum(same for same, _ in by_task.values()),
        "outputs": sum(len(record.rows) for record in first),
        "identical_by_task": by_task,
    }
    spent = [(r.seconds, r.stats) for r in group if r.stats is not None]
    if spent:
        row |= _drafting([stats for _, stats in spent], sum(seconds for seconds, _ in spent))
    return row


def _spread_of(group: Sequence[Record], figure: str) -> Summary:
    low, middle, high = spread(list(per_prompt(group, figure).values()))
    return {f"{figure}_p20": low, figure: middle, f"{figure}_p80": high}


def _identical(group: Sequence[Record]) -> dict[str, tuple[int, int]] | None:
    """Task -> outputs identical in every repetition, and all outputs; None if they are sampled."""
    outputs: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for record in group:
        for place, row in enumerate(record.rows):
            outputs[record.prompt, place].append(row)
    if any(row.identical is None for rows in outputs.values() for row in rows):
        return None
    found: dict[str, tuple[int, int]] = {}
    for rows in outputs.values():
        same, number = found.get(rows[0].task, (0, 0))
        found[rows[0].task] = same + all(row.identical for row in rows), number + 1
    return found


def _drafting(stats: Sequence[StrategyStats], seconds: float) -> Summary:
    """What only our own strategies tell: acceptance, drafts, where the time went."""
    count = len(stats)
    rounds = sum(s.counters.get("rounds", 0) for s in stats)
    merged = sum(s.counters.get("rounds_with_merged_accepted", 0) for s in stats)
    drafted = _add_up([s.drafted_by_position for s in stats])
    accepted = _add_up([s.accepted_by_position for s in stats])
    return {
        "tau": sum(s.tau for s in stats) / count,
        "acceptance_by_position": [
            taken / sent for taken, sent in zip(accepted, drafted, strict=False)
        ],
        "drafted_tokens": sum(s.drafted_tokens for s in stats) / count,
        "draft_nodes": sum(s.counters.get("draft_nodes", s.drafted_tokens) for s in stats) / count,
        "draft_forwards": sum(s.draft_forwards for s in stats) / count,
        "rounds_with_merged_accepted": merged / rounds if rounds else 0.0,
        "draft_share": sum(s.draft_seconds for s in stats) / seconds,
        "verify_share": sum(s.verify_seconds for s in stats) / seconds,
        "outside_forward": 1 - sum(s.verify_seconds for s in stats) / seconds,
    }


def _add_up(counts: Sequence[Sequence[int]]) -> list[int]:
    totals = [0] * max(map(len, counts), default=0)
    for row in counts:
        for position, number in enumerate(row):
            totals[position] += number
    return totals


def notice(results: Mapping[str, Any]) -> str:
    """What stands above tables and plots of drafts that no drafter made; empty otherwise."""
    acceptance = results.get("synthetic_acceptance")
    return "" if acceptance is None else f"SYNTHETIC acceptance {acceptance:g}"


def sections(results: Mapping[str, Any]) -> list[Section]:
    """What `hf_spec.bench.suite` measured, by batch size: speeds, tasks, drafts, parts of steps."""
    found = []
    for size in dict.fromkeys(row["batch_size"] for row in results["summary"]):
        rows = [row for row in results["summary"] if row["batch_size"] == size]
        overall = [row for row in rows if row["task"] == ALL]
        profiles = [p for p in results.get("profiles", []) if p["batch_size"] == size]
        tables = (_speeds(overall), _by_task(rows), _drafts(overall), _profile(profiles))
        found.append(Section(f"batch size {size}", [table for table in tables if table.rows]))
    return found


def markdown(results: Mapping[str, Any]) -> str:
    """The tables for a page."""
    return _pages(results, "**{}**", "### {}", Table.markdown)


def text(results: Mapping[str, Any]) -> str:
    """The tables for a pipe or a log."""
    return _pages(results, "{}", "{}", Table.text)


def _pages(
    results: Mapping[str, Any], warning: str, title: str, written: Callable[[Table], str]
) -> str:
    said = notice(results)
    parts = [warning.format(said) + SYNTHETIC] if said else []
    for section in sections(results):
        parts += [title.format(section.title), *map(written, section.tables)]
    return "\n\n".join(parts)


def _speeds(rows: Sequence[Summary]) -> Table:
    head = ["", "ratio to plain, median (p20 - p80)", f"ratio to {IDLE}", "total time ratio"]
    head += ["tokens/s, median (p20 - p80)", "tau", "tokens / target forward", "peak memory, MiB"]
    return Table(
        [*head, "identical"],
        [
            [
                row["contender"],
                _with_spread(row, "ratio", 2),
                _number(row.get("ratio_to_none"), 2),
                f"{row['total_ratio']:.2f}",
                _with_spread(row, "tokens_per_second", 1),
                _number(row.get("tau"), 2),
                _number(row["tokens_per_forward"], 2),
                _number(row["peak_bytes"] and row["peak_bytes"] / 2**20, 0),
                _count(row["identical"], row["outputs"]),
            ]
            for row in rows
        ],
    )


def _by_task(rows: Sequence[Summary]) -> Table:
    """Ratios and identical outputs by task; of batches that mix tasks the outputs alone."""
    found = {(row["contender"], row["task"]): row for row in rows}
    overall = [row for row in rows if row["task"] == ALL]
    tasks = sorted({task for row in overall for task in row["identical_by_task"] or []})
    tasks = tasks or sorted({row["task"] for row in rows} - {ALL})

    def cell(row: Summary, task: str) -> str:
        own = found.get((row["contender"], task))
        ratio = [f"{own['ratio']:.2f}"] if own else []
        counts = row["identical_by_task"]
        return " ".join([*ratio, *([f"({_count(*counts[task])})"] if counts else [])])

    head = ["ratio (identical outputs) by task", *tasks]
    return Table(head, [[row["contender"], *(cell(row, t) for t in tasks)] for row in overall])


def _drafts(rows: Sequence[Summary]) -> Table:
    drafting = [row for row in rows if row.get("drafted_tokens")]
    head = ["per generation", f"acceptance at position 1 to {SHOWN_POSITIONS}", "drafted"]
    head += ["drafted, not sent included", "draft forwards", "rounds with a merged token accepted"]
    return Table(
        [*head, "draft / verify / other time"],
        [
            [
                row["contender"],
                " ".join(f"{a:.2f}" for a in row["acceptance_by_position"][:SHOWN_POSITIONS]),
                f"{row['drafted_tokens']:.1f}",
                f"{row['draft_nodes']:.1f}",
                f"{row['draft_forwards']:.1f}",
                f"{row['rounds_with_merged_accepted']:.1%}",
                _shares([row["draft_share"], row["verify_share"], 1]),
            ]
            for row in drafting
        ],
    )


def _shares(shares: Sequence[float]) -> str:
    draft, verify, whole = shares
    return (
        " / ".join(f"{100 * part:.0f}" for part in (draft, verify, whole - draft - verify)) + " %"
    )


def _profile(profiles: Sequence[Mapping[str, Any]]) -> Table:
    seconds = [profile["seconds"] for profile in profiles]
    parts = [part for part in PARTS if any(part in found for found in seconds)]
    return Table(
        ["share of the time, %", *parts],
        [
            [p["contender"], *(_percent(p["seconds"].get(part, 0.0), p) for part in parts)]
            for p in profiles
            if parts
        ],
    )


def _percent(seconds: float, profile: Mapping[str, Any]) -> str:
    return f"{100 * seconds / sum(profile['seconds'].values()):.1f}"


def _with_spread(row: Summary, figure: str, digits: int) -> str:
    low, middle, high = (row[f"{figure}{end}"] for end in ("_p20", "", "_p80"))
    return f"{middle:.{digits}f} ({low:.{digits}f} - {high:.{digits}f})"


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _count(same: int | None, outputs: int) -> str:
    return "-" if same is None else f"{same} of {outputs}"


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the tables of a results file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, help="JSON file of hf-spec bench --out")
    parser.add_argument("--plots", type=Path, help="folder to draw its plots into")
    options = parser.parse_args(argv)
    results = json.loads(options.results.read_text(encoding="utf-8"))
    print(markdown(results))  # noqa: T201 - the command's result
    if options.plots:
        from hf_spec.bench.result_plots import draw

        draw(results, options.plots)


if __name__ == "__main__":
    main()
