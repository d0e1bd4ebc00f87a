"""Tables and a plot of `examples.studies.ems_sd.batches`.

Padding ratios stand side by side: what was measured, and what the paper's model of acceptance
(`examples.studies.ems_sd.padding`) gives for rows that gain as many tokens on average and accept
alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from examples.studies.ems_sd.padding import accuracy_for, padding_ratio

MODES = ("padded", "unpadded_input", "unpadded_kv", "unpadded")


def summary(records: Sequence[Mapping[str, Any]], caps: Mapping[str, int]) -> list[dict[str, Any]]:
    """One row per method and batch size.

    Args:
        records: `BatchRecord`s as dictionaries.
        caps: by method the most tokens that a row can gain in a step.

    Returns:
        Rows with `ratio`, `tokens_per_second` and `linear_tokens` (per generated token) by
        contender, medians over batches and repetitions; `unpadded_to_padded`, the speed of one
        relative to the other in the same repetition; `padding_ratio` as measured and
        `padding_ratio_model`; the accepted lengths; and how many outputs were identical.
    """
    rows = []
    groups = dict.fromkeys((r["method"], r["batch_size"]) for r in records)
    for method, size in groups:
        mine = [r for r in records if (r["method"], r["batch_size"]) == (method, size)]
        by_name: dict[str, list[Mapping[str, Any]]] = {}
        for record in mine:
            by_name.setdefault(record["contender"], []).append(record)
        measured = by_name["unpadded"]
        gain = fmean(r["accepted_length_mean"] for r in measured)
        rows.append(
            {
                "method": method,
                "batch_size": size,
                "ratio": {
                    name: median(r["plain_seconds"] / r["seconds"] for r in found)
                    for name, found in by_name.items()
                },
                "unpadded_to_padded": median(
                    slow["seconds"] / fast["seconds"]
                    for slow, fast in zip(by_name["padded"], measured, strict=True)
                ),
                "tokens_per_second": {
                    name: median(r["new_tokens"] / r["seconds"] for r in found)
                    for name, found in by_name.items()
                },
                "linear_tokens": {
                    name: median(r["linear_tokens"] / r["new_tokens"] for r in found)
                    for name, found in by_name.items()
                },
                "padding_ratio": fmean(r["padding_ratio"] for r in measured),
                "padding_ratio_model": padding_ratio(
                    accuracy_for(gain, caps[method]), size, caps[method]
                ),
                "accepted_length_mean": gain,
                "accepted_length_min": fmean(r["accepted_length_min"] for r in measured),
                "identical": sum(r["identical"] for r in mine),
                "outputs": len(mine),
            }
        )
    return rows


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table per method: speeds, then tokens run and padding."""
    parts = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        parts += [f"### {method}", "", *_speeds(mine), "", *_padding(mine), ""]
    return "\n".join(parts)


def _speeds(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| batch | plain, tokens/s | padded | unpadded_input | unpadded_kv | unpadded | "
        "unpadded to padded | identical |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratios = (f"{row['ratio'][mode]:.2f}" for mode in MODES)
        lines.append(
            f"| {row['batch_size']} | {row['tokens_per_second']['plain']:.1f} | "
            f"{' | '.join(ratios)} | {row['unpadded_to_padded']:.2f} | "
            f"{row['identical']} of {row['outputs']} |"
        )
    return lines


def _padding(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [
        "| batch | tokens run per new token: plain | padded | unpadded | accepted length, mean | "
        "least | padding ratio, measured | padding ratio, model of Appendix B |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        run = (f"{row['linear_tokens'][name]:.2f}" for name in ("plain", "padded", "unpadded"))
        lines.append(
            f"| {row['batch_size']} | {' | '.join(run)} | {row['accepted_length_mean']:.2f} | "
            f"{row['accepted_length_min']:.2f} | {row['padding_ratio']:.1%} | "
            f"{row['padding_ratio_model']:.1%} |"
        )
    return lines


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw speed and padding ratio over the batch size, one line of panels per method."""
    from matplotlib.figure import Figure

    methods = list(dict.fromkeys(row["method"] for row in rows))
    figure = Figure(figsize=(10, 4 * len(methods)), layout="constrained")
    grid = figure.subplots(len(methods), 2, squeeze=False)
    for (left, right), method in zip(grid, methods, strict=True):
        mine = [row for row in rows if row["method"] == method]
        sizes = [row["batch_size"] for row in mine]
        for mode in MODES:
            left.plot(sizes, [row["ratio"][mode] for row in mine], marker="o", label=mode)
        left.axhline(1.0, color="grey", linewidth=1)
        left.set(title=method, ylabel="speed relative to plain", ylim=(0, None))
        for key, label, style in (
            ("padding_ratio", "measured", "-"),
            ("padding_ratio_model", "model of Appendix B, same accepted length", "--"),
        ):
            right.plot(sizes, [row[key] for row in mine], style, marker="o", label=label)
        right.set(title=method, ylabel="padding ratio")
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            axes.set_xticks(sizes, map(str, sizes))
            axes.set_xlabel("batch size")
            axes.grid(alpha=0.3)
            axes.legend(frameon=False, fontsize="small")
    figure.savefig(path)
