"""Plots of what the benchmarks and trainings recorded.

Run as `python -m hf_spec.bench.plots RECORDS.json --out plot.svg`, where the records hold trainings
with their evaluations, as in `examples/studies/falcon/smollm2_falcon_training.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]
# Per point of a series the lower and the upper end of its spread.
Spreads = Mapping[str, tuple[Sequence[float], Sequence[float]]]
# A name and its low, middle and high value.
Ranges = Mapping[str, tuple[float, float, float]]

# More lines than this have their legend beside the plot, not in it.
LEGEND_INSIDE = 4
MARKERS = "os^Dvp*Xh<>P"


def lines(
    series: Series,
    labels: tuple[str, str],
    path: Path,
    title: str = "",
    spreads: Spreads | None = None,
) -> None:
    """Draw lines with a mark at every measured point.

    Args:
        series: name -> x and y values.
        labels: of the axes, with units.
        path: file to write; its ending names the format.
        title: above the plot.
        spreads: drawn as bars, for the series that it names.
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
    """Draw panels side by side, each with a dot and a bar per name; a grey line stands at 1.

    Args:
        panels: title -> values; the names of the first panel stand at the left.
        label: of the values, with units.
        path: file to write; its ending names the format.
        title: above all panels.
    """
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(name for panel in panels.values() for name in panel))
    size = (3.0 + 1.7 * len(panels), 1.4 + 0.26 * len(names))
    figure = Figure(figsize=size, layout="constrained")
    row = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (heading, panel) in zip(row, panels.items(), strict=True):
        for name, (low, middle, high) in panel.items():
            place = len(names) - 1 - names.index(name)
            axes.hlines(place, low, high, color="C0", alpha=0.5, linewidth=2)
            axes.plot(middle, place, "o", color="C0", markersize=5)
        axes.axvline(1.0, color="grey", linewidth=1)
        axes.set_title(heading, fontsize="small")
        axes.set_yticks(range(len(names)), reversed(names), fontsize="small")
        axes.grid(alpha=0.3)
    # Shared by all panels, so only when all are drawn.
    row[0].set_xlim(left=0)
    figure.supxlabel(label, fontsize="small")
    figure.suptitle(title, fontsize="medium")
    figure.savefig(path, dpi=150)


def training_curves(records: Mapping[str, Any], figure: str) -> Series:
    """Evaluations of every training in `records` over the answer tokens it had seen, in millions.

    Args:
        records: name -> a training with its "evaluations"; other entries are left out.
        figure: which of the evaluated figures, such as "tau".
    """
    found = {}
    for name, training in records.items():
        evaluations = training.get("evaluations", []) if isinstance(training, Mapping) else []
        if points := [one for one in evaluations if figure in one]:
            seen = [one["answer_tokens"] / 1e6 for one in points]
            found[name] = seen, [one[figure] for one in points]
    return found


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, help="JSON file with trainings")
    parser.add_argument("--figure", default="tau", help="what is drawn over the tokens seen")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    options = parser.parse_args(argv)
    series = training_curves(json.loads(options.records.read_text()), options.figure)
    if not series:
        parser.error(f"{options.records} has no training with {options.figure!r}")
    lines(series, ("answer tokens seen, millions", options.figure), options.out, options.title)


if __name__ == "__main__":
    main()
