"""Plots of a benchmark: speed by task and batch size, acceptance by position, forward pass cost.

`draw` plots the results of `hf-spec bench --out`; `lines` and `ranges` plot any values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hf_spec.common.prompts import MIXED
from hf_spec.evaluation.bench.summary import ALL, notice, spread

# Coordinates of points, or the lower and upper ends of their spread, by name.
Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
# Low, middle and high value by name.
Ranges = Mapping[str, tuple[float, float, float]]

# With more lines than this, the legend is placed beside the plot.
LEGEND_INSIDE = 4
MARKERS = "os^Dvp*Xh<>P"
# Labels of the forms of `measure_step_cost`.
FORMS = {
    "transformers": "transformers, DynamicCache",
    "off": "hf_spec, packing off",
    "auto": "hf_spec",
}
SPEED = "speed relative to plain generate()"
SPREAD = "median and 20th to 80th percentile"


def draw(results: Mapping[str, Any], folder: Path) -> list[Path]:
    """Draw the plots of benchmark results into a folder, created if needed; return the files.

    They are speed_by_task.png, speed_by_batch.png for several batch sizes,
    acceptance_by_position.png if there were drafts, verify_cost.png if it was measured.
    """
    folder.mkdir(parents=True, exist_ok=True)
    facts = [Path(str(results.get("model", "model"))).name, results.get("dtype"), notice(results)]
    about = ", ".join(str(fact) for fact in facts if fact)
    rows = results["summary"]
    sizes = list(dict.fromkeys(row["batch_size"] for row in rows))
    single = [row for row in rows if row["batch_size"] == min(sizes)]
    about_single = f"{about}, batch size {min(sizes)}"
    tasks = sorted({row["task"] for row in single} - {ALL, MIXED})
    overall = [row for row in rows if row["task"] == ALL]
    written = [folder / "speed_by_task.png"]
    panels = {
        task: _ratios([row for row in single if row["task"] == task])
        for task in ([ALL, *tasks] if len(tasks) > 1 else [ALL])
    }
    ranges(panels, f"{SPEED}: {SPREAD}", written[0], about_single)
    if len(sizes) > 1:
        written.append(folder / "speed_by_batch.png")
        panels = {
            f"batch size {size}": _ratios([row for row in overall if row["batch_size"] == size])
            for size in sizes
        }
        ranges(panels, f"{SPEED} at this size: {SPREAD}", written[-1], about)
    accepted = {
        row["contender"]: (range(1, len(shares) + 1), shares)
        for row in single
        if row["task"] == ALL and (shares := row.get("acceptance_by_position"))
    }
    if accepted:
        labels = ("position in the draft", "accepted up to here, of drafts that reach it")
        written.append(folder / "acceptance_by_position.png")
        lines(accepted, labels, written[-1], about_single)
    if results.get("step_cost"):
        series, spreads = _step_cost(results["step_cost"])
        labels = ("nodes of one forward", "milliseconds")
        written.append(folder / "verify_cost.png")
        lines(series, labels, written[-1], f"{about}\n{SPREAD}", spreads)
    return written


def _ratios(rows: Sequence[Mapping[str, Any]]) -> Ranges:
    return {row["contender"]: (row["ratio_p20"], row["ratio"], row["ratio_p80"]) for row in rows}


def _step_cost(seconds: Mapping[str, Mapping[Any, Sequence[float]]]) -> tuple[Series, Series]:
    series, spreads = {}, {}
    for form, by_count in seconds.items():
        # In JSON the node counts are strings.
        counts = [int(count) for count in by_count]
        spans = [spread([1e3 * value for value in values]) for values in by_count.values()]
        name = FORMS[form]
        series[name] = counts, [middle for _, middle, _ in spans]
        spreads[name] = [low for low, _, _ in spans], [high for _, _, high in spans]
    return series, spreads


def lines(
    series: Series,
    labels: tuple[str, str],
    path: Path,
    title: str = "",
    spreads: Series | None = None,
) -> None:
    """Draw lines with a marker at every point and a bar for each spread.

    The axis labels include units. The suffix of `path` sets the format.
    """
    from matplotlib import colormaps
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    inside = len(series) <= LEGEND_INSIDE
    figure = Figure(figsize=(6.4 if inside else 9.6, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for index, (name, (x, y)) in enumerate(series.items()):
        color = f"C{index}" if len(series) <= 10 else colormaps["tab20"](index % 20)
        marker = MARKERS[index % len(MARKERS)]
        axes.plot(x, y, marker=marker, color=color, markersize=4, label=name)
        if spreads and name in spreads:
            low, high = spreads[name]
            axes.vlines(x, low, high, color=color, alpha=0.4)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize="medium")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if all(isinstance(value, int) for x, _ in series.values() for value in x):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) > 1:
        legend = axes.legend(frameon=False, fontsize="small")
        if not inside:
            legend.set_loc("center left")
            legend.set_bbox_to_anchor((1.0, 0.5))
    figure.savefig(path, dpi=150)


def ranges(panels: Mapping[str, Ranges], label: str, path: Path, title: str = "") -> None:
    """Draw titled panels side by side, with a dot and a bar per name and a gray line at 1.

    The label of the values includes units. The suffix of `path` sets the format.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    size = (3.0 + 1.7 * len(panels), 1.4 + 0.26 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (heading, panel) in zip(row, panels.items(), strict=True):
        for name, (low, middle, high) in panel.items():
            height = len(names) - 1 - names.index(name)
            axes.hlines(height, low, high, color="C0", alpha=0.5, linewidth=2)
            axes.plot(middle, height, "o", color="C0", markersize=5)
        axes.axvline(1.0, color="gray", linewidth=1)
        axes.set_title(heading, fontsize="small")
        axes.set_yticks(range(len(names)), reversed(names), fontsize="small")
        axes.grid(alpha=0.3)
    # The axis is shared, so set its limit after all panels are drawn.
    row[0].set_xlim(left=0)
    figure.supxlabel(label, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)
