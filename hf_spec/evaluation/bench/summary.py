"""Summary of benchmark records: medians and their spread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, median, quantiles
from typing import Any

from hf_spec.common.outputs import SpecStats
from hf_spec.evaluation.bench.runner import Record, Row

ALL = "all"
# The engine without drafting.
IDLE = "none"
Summary = dict[str, Any]


def per_prompt(records: Iterable[Record], figure: str = "ratio") -> dict[str, float]:
    """Return prompt id -> median of a figure of the records over its repetitions."""
    values: dict[str, list[float]] = defaultdict(list)
    for record in records:
        values[record.prompt].append(getattr(record, figure))
    return {prompt: median(repeats) for prompt, repeats in values.items()}


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th percentile, the median and the 80th percentile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    fifths = quantiles(values, n=5, method="inclusive")
    return fifths[0], median(values), fifths[3]


def summary(records: Sequence[Record]) -> list[Summary]:
    """Return one row per batch size, contender and task, and one for all tasks (`task` is "all").

    A batch with prompts of several tasks counts for "all" and "mixed"; `identical_by_task` still
    counts its outputs by task.
    """
    groups: dict[tuple[int, str, str], list[Record]] = defaultdict(list)
    for record in records:
        for task in (record.task, ALL):
            groups[record.batch_size, record.contender, task].append(record)
    idle = {_run_key(r): r.ratio for r in records if r.contender == IDLE}
    return [
        {**_row(*key, group), "ratio_to_none": _ratio_to(idle, group)}
        for key, group in groups.items()
    ]


def notice(results: Mapping[str, Any]) -> str:
    """Return the notice above tables and plots with synthetic drafts; empty without them."""
    acceptance = results.get("synthetic_acceptance")
    return "" if acceptance is None else f"SYNTHETIC acceptance {acceptance:g}"


def _run_key(record: Record) -> tuple[int, str, int]:
    return record.batch_size, record.prompt, record.repeat


def _ratio_to(others: Mapping[Any, float], group: Sequence[Record]) -> float | None:
    """Return the median over prompts of the speedup over `others` in the same repetition."""
    if any(_run_key(record) not in others for record in group):
        return None
    ratios: dict[str, list[float]] = defaultdict(list)
    for record in group:
        ratios[record.prompt].append(record.ratio / others[_run_key(record)])
    return median(map(median, ratios.values()))


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
        **spread_of(per_prompt(group), "ratio"),
        **spread_of(per_prompt(group, "tokens_per_second"), "tokens_per_second"),
        "total_ratio": sum(r.plain_seconds for r in group) / sum(r.seconds for r in group),
        "tokens_per_forward": tokens / sum(forwards) / batch_size if counted else None,
        "peak_bytes": max(peaks, default=None),
        "identical": None if by_task is None else sum(same for same, _ in by_task.values()),
        "outputs": sum(len(record.rows) for record in first),
        "identical_by_task": by_task,
    }
    ours = [(r.seconds, r.stats) for r in group if r.stats is not None]
    if ours:
        row |= _drafting([stats for _, stats in ours], sum(seconds for seconds, _ in ours))
    return row


def spread_of(values: Mapping[str, float], figure: str) -> Summary:
    """Return the spread over prompts under the names of a figure."""
    low, middle, high = spread(list(values.values()))
    return {f"{figure}_p20": low, figure: middle, f"{figure}_p80": high}


def _identical(group: Sequence[Record]) -> dict[str, tuple[int, int]] | None:
    """Return task -> (outputs identical in every repetition, all outputs); None if sampled."""
    outputs: dict[tuple[str, int], list[Row]] = defaultdict(list)
    for record in group:
        for index, row in enumerate(record.rows):
            outputs[record.prompt, index].append(row)
    if any(row.identical is None for rows in outputs.values() for row in rows):
        return None
    counts: dict[str, tuple[int, int]] = {}
    for rows in outputs.values():
        same, number = counts.get(rows[0].task, (0, 0))
        counts[rows[0].task] = same + all(row.identical for row in rows), number + 1
    return counts


def _drafting(stats: Sequence[SpecStats], seconds: float) -> Summary:
    """Return the figures of our strategies: acceptance, drafts, shares of the time."""
    total, count = sum(stats, SpecStats([])), len(stats)
    rounds = total.counters.get("rounds", 0)
    merged = total.counters.get("rounds_with_merged_accepted", 0)
    positions = zip(total.accepted_by_position, total.drafted_by_position, strict=False)
    return {
        "tau": fmean(s.tau for s in stats),
        "alpha": total.accepted_tokens / max(total.new_tokens, 1),
        "acceptance_by_position": [accepted / drafted for accepted, drafted in positions],
        "drafted_tokens": total.drafted_tokens / count,
        "draft_nodes": fmean(s.counters.get("draft_nodes", s.drafted_tokens) for s in stats),
        "draft_forwards": total.draft_forwards / count,
        "rounds_with_merged_accepted": merged / rounds if rounds else 0.0,
        "draft_share": total.draft_seconds / seconds,
        "verify_share": total.verify_seconds / seconds,
        "outside_forward": 1 - total.verify_seconds / seconds,
    }
