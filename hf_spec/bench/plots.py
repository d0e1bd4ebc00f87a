"""Plots of what the benchmarks and trainings recorded.

Run as `python -m hf_spec.bench.plots RECORDS.json --out plot.svg`, where the records hold trainings
with their evaluations, as in `hf_spec/bench/results/smollm2_falcon_training.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Series = Mapping[str, tuple[Sequence[float], Sequence[float]]]


def lines(series: Series, labels: tuple[str, str], path: Path, title: str = "") -> None:
    """Draw lines with a mark at every measured point.

    Args:
        series: name -> x and y values.
        labels: of the axes, with units.
        path: file to write; its ending names the format.
        title: above the plot.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    for name, (x, y) in series.items():
        axes.plot(x, y, marker="o", markersize=4, label=name)
    axes.set_xlabel(labels[0])
    axes.set_ylabel(labels[1])
    axes.set_title(title, fontsize="medium")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if len(series) > 1:
        axes.legend(frameon=False, fontsize="small")
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
