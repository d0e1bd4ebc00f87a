"""Tables and a plot of `examples.studies.ems_sd.batches`.

Measured padding ratios are shown next to those of the paper's acceptance model
(`examples.studies.ems_sd.padding`), for rows with the same mean gain and equal acceptance
probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from examples.studies.ems_sd.padding import accuracy_for, padding_ratio
from hf_spec.common.tables import Table

MODES = ("padded", "unpadded_input", "unpadded_kv", "unpadded")


def summary(records: Sequence[Mapping[str, Any]], caps: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return one row per method and batch size.

    Args:
        records: `BatchRecord`s as dictionaries.
        caps: method -> maximum number of tokens that a row can gain in a step.

    Returns:
        Rows with `ratio`, `tokens_per_second` and `linear_tokens` (per generated token) by
        contender, medians over batches and repetitions. `decoding_ratio` and `decoding_tokens`
        are the same without prefill, after the first token. `unpadded_to_padded` and
        `decoding_unpadded_to_padded` are the relative speeds in the same repetition. Rows also
        have the measured `padding_ratio`, `padding_ratio_model`, the accepted lengths, and the
        number of identical outputs.
    """
    rows = []
    methods = dict.fromkeys(record["method"] for record in records)
    groups = {(record["method"], record["batch_size"]) for record in records}
    for method, size in sorted(groups, key=lambda group: ([*methods].index(group[0]), group[1])):
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
                "decoding_ratio": {
                    name: median(
                        (r["plain_seconds"] - r["plain_prompt_seconds"]) / _decoding(r)
                        for r in found
                    )
                    for name, found in by_name.items()
                },
                "unpadded_to_padded": median(
                    slow["seconds"] / fast["seconds"]
                    for slow, fast in zip(by_name["padded"], measured, strict=True)
                ),
                "decoding_unpadded_to_padded": median(
                    _decoding(slow) / _decoding(fast)
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
                "decoding_tokens": {
                    name: median(
                        (r["linear_tokens"] - r["prompt_tokens"]) / r["new_tokens"] for r in found
                    )
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


def _decoding(record: Mapping[str, Any]) -> float:
    """Return the seconds after the first token."""
    seconds: float = record["seconds"] - record["prompt_seconds"]
    return seconds


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return tables of each method: speeds, speeds without prefill, tokens run and padding."""
    parts = []
    for method in dict.fromkeys(row["method"] for row in rows):
        mine = [row for row in rows if row["method"] == method]
        shown = [SPEEDS, DECODING, PADDING]
        if all("left_padded" in row["ratio"] for row in mine):
            shown.append(LEFT_PADDING)
        parts += [f"### {method}", *(Table.of(columns, mine).markdown() for columns in shown)]
    return "\n\n".join(parts) + "\n"


def _figure(name: str, part: str = "", form: str = ".2f") -> Callable[[Mapping[str, Any]], str]:
    return lambda row: format(row[name][part] if part else row[name], form)


SPEEDS = {
    "batch": _figure("batch_size", form=""),
    "plain, tokens/s": _figure("tokens_per_second", "plain", ".1f"),
    **{mode: _figure("ratio", mode) for mode in MODES},
    "unpadded to padded": _figure("unpadded_to_padded"),
    "identical": lambda row: f"{row['identical']} of {row['outputs']}",
}
DECODING = {
    "batch, without prompts": _figure("batch_size", form=""),
    **{mode: _figure("decoding_ratio", mode) for mode in MODES},
    "unpadded to padded": _figure("decoding_unpadded_to_padded"),
    # A heading that equals a mode's would take its column of speeds.
    "tokens run per new token: plain": _figure("decoding_tokens", "plain"),
    "tokens run: padded": _figure("decoding_tokens", "padded"),
    "tokens run: unpadded": _figure("decoding_tokens", "unpadded"),
}
LEFT_PADDING = {
    "batch": _figure("batch_size", form=""),
    "plain after more padding, prompts included": _figure("ratio", "left_padded"),
    "without prompts": _figure("decoding_ratio", "left_padded"),
    "tokens run per new token": _figure("linear_tokens", "left_padded"),
}
PADDING = {
    "batch": _figure("batch_size", form=""),
    "tokens run per new token: plain": _figure("linear_tokens", "plain"),
    "padded": _figure("linear_tokens", "padded"),
    "unpadded": _figure("linear_tokens", "unpadded"),
    "accepted length, mean": _figure("accepted_length_mean"),
    "least": _figure("accepted_length_min"),
    "padding ratio, measured": _figure("padding_ratio", form=".1%"),
    "padding ratio, model of Appendix B": _figure("padding_ratio_model", form=".1%"),
}


def plot(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw speed and padding ratio over the batch size, one row of panels per method."""
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
