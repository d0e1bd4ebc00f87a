"""Tables from benchmark records: median ratios with spread, never a single run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, quantiles

from hf_spec.bench.runner import Record


def per_prompt(records: Iterable[Record]) -> dict[str, float]:
    """Prompt id -> median ratio over its repetitions."""
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in records:
        ratios[record.prompt].append(record.ratio)
    return {prompt: median(values) for prompt, values in ratios.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """20th percentile, median and 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = quantiles(values, n=5, method="inclusive")
    return fifths[0], median(values), fifths[3]


def summary(records: Sequence[Record]) -> list[dict[str, object]]:
    """One row per contender and task, and one per contender over all tasks (`task` is "all")."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.contender, record.task].append(record)
        groups[record.contender, "all"].append(record)
    return [_row(name, task, group) for (name, task), group in groups.items()]


def _row(contender: str, task: str, group: Sequence[Record]) -> dict[str, object]:
    low, middle, high = spread(list(per_prompt(group).values()))
    first = [record for record in group if record.repeat == 0]
    tokens = sum(record.new_tokens for record in first)
    forwards = [record.target_forwards for record in first if record.target_forwards is not None]
    row: dict[str, object] = {
        "contender": contender,
        "task": task,
        "prompts": len(first),
        "ratio_p20": low,
        "ratio": middle,
        "ratio_p80": high,
        "total_ratio": sum(r.plain_seconds for r in group) / sum(r.seconds for r in group),
        "tokens_per_second": median(r.new_tokens / r.seconds for r in group),
        "tokens_per_forward": tokens / sum(forwards) if len(forwards) == len(first) else None,
        "identical": sum(record.identical for record in first),
    }
    timed = [r for r in group if r.verify_seconds is not None]
    if timed:
        row["tau"] = sum(r.tau or 0.0 for r in timed) / len(timed)
        spent = sum(r.seconds for r in timed)
        row["outside_forward"] = 1 - sum(r.verify_seconds or 0.0 for r in timed) / spent
    return row


def markdown(records: Sequence[Record]) -> str:
    """A table of overall figures and one of ratios by task."""
    rows = summary(records)
    tasks = sorted({str(row["task"]) for row in rows} - {"all"})
    lines = [
        "| | ratio to plain, median (p20 - p80) | total time ratio | tokens / s | "
        "tokens / target forward | identical |",
        "|---|---|---|---|---|---|",
    ]
    by_task = [
        "| ratio by task, median | " + " | ".join(tasks) + " |",
        "|---|" + "---|" * len(tasks),
    ]
    names = list(dict.fromkeys(str(row["contender"]) for row in rows))
    table = {(row["contender"], row["task"]): row for row in rows}
    for name in names:
        row = table[name, "all"]
        per_forward = row["tokens_per_forward"]
        lines.append(
            f"| {name} | {row['ratio']:.2f} ({row['ratio_p20']:.2f} - {row['ratio_p80']:.2f}) | "
            f"{row['total_ratio']:.2f} | {row['tokens_per_second']:.1f} | "
            f"{'-' if per_forward is None else format(per_forward, '.2f')} | "
            f"{row['identical']} of {row['prompts']} |"
        )
        cells = [f"{table[name, task]['ratio']:.2f}" for task in tasks]
        by_task.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *by_task])
