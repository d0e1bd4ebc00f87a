"""Tables from benchmark records: median ratios with spread, never a single run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median, quantiles
from typing import Any

from hf_spec.bench.runner import Record, StrategyStats


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


def summary(records: Sequence[Record]) -> list[dict[str, Any]]:
    """One row per contender and task, and one per contender over all tasks (`task` is "all")."""
    groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in records:
        groups[record.contender, record.task].append(record)
        groups[record.contender, "all"].append(record)
    return [_row(name, task, group) for (name, task), group in groups.items()]


def _row(contender: str, task: str, group: Sequence[Record]) -> dict[str, Any]:
    low, middle, high = spread(list(per_prompt(group).values()))
    first = [record for record in group if record.repeat == 0]
    tokens = sum(record.new_tokens for record in first)
    forwards = [record.target_forwards for record in first if record.target_forwards is not None]
    row: dict[str, Any] = {
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
    spent = [(r.seconds, r.stats) for r in group if r.stats is not None]
    if spent:
        row |= _drafting([stats for _, stats in spent], sum(seconds for seconds, _ in spent))
    return row


def _drafting(stats: Sequence[StrategyStats], seconds: float) -> dict[str, Any]:
    """What only our own strategies tell: acceptance, drafts, where the time went."""
    count = len(stats)
    rounds = sum(s.counters.get("rounds", 0) for s in stats)
    merged = sum(s.counters.get("rounds_with_merged_accepted", 0) for s in stats)
    return {
        "tau": sum(s.tau for s in stats) / count,
        "drafted_tokens": sum(s.drafted_tokens for s in stats) / count,
        "draft_nodes": sum(s.counters.get("draft_nodes", s.drafted_tokens) for s in stats) / count,
        "draft_forwards": sum(s.draft_forwards for s in stats) / count,
        "rounds_with_merged_accepted": merged / rounds if rounds else 0.0,
        "draft_share": sum(s.draft_seconds for s in stats) / seconds,
        "verify_share": sum(s.verify_seconds for s in stats) / seconds,
        "outside_forward": 1 - sum(s.verify_seconds for s in stats) / seconds,
    }


def markdown(records: Sequence[Record]) -> str:
    """Tables of overall figures, of ratios by task and of what was drafted."""
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
    drafting = [
        "| per generation | tau | drafted | drafted, not sent included | draft forwards | "
        "rounds with a merged token accepted | draft / verify / other time |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in names:
        row = table[name, "all"]
        if row.get("drafted_tokens"):
            shares = [row["draft_share"], row["verify_share"]]
            drafting.append(
                f"| {name} | {row['tau']:.2f} | {row['drafted_tokens']:.1f} | "
                f"{row['draft_nodes']:.1f} | {row['draft_forwards']:.1f} | "
                f"{row['rounds_with_merged_accepted']:.1%} | "
                + " / ".join(f"{100 * share:.0f}" for share in (*shares, 1 - sum(shares)))
                + " % |"
            )
    return "\n".join([*lines, "", *by_task, *(["", *drafting] if len(drafting) > 2 else [])])
