"""Plot learning curves of recorded trainings: an evaluated figure over the tokens seen.

Run as `python -m examples.studies.falcon.training_curves RECORD.json ... --out plot.svg`, on
records such as `examples/studies/falcon/smollm2_falcon_training.json` and those of
`examples.studies.trainings`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.studies.trainings import SEEN
from hf_spec.evaluation.bench.plots import Series, lines


def training_curves(records: Mapping[str, Any], figure: str) -> Series:
    """Return the evaluations of each training over the answer tokens seen, in millions.

    Args:
        records: name -> a training with its "evaluations"; entries without evaluations or token
            counts are left out.
        figure: name of an evaluated figure, such as "tau".
    """
    found = {}
    for name, training in records.items():
        evaluations = training.get("evaluations", []) if isinstance(training, Mapping) else []
        if points := [one for one in evaluations if figure in one and SEEN in one]:
            seen = [one[SEEN] / 1e6 for one in points]
            found[name] = seen, [one[figure] for one in points]
    return found


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path, nargs="+", help="JSON files with trainings")
    parser.add_argument("--only", nargs="+", default=[], help="names of trainings; all by default")
    parser.add_argument("--figure", default="tau", help="what is drawn over the tokens seen")
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, required=True, help="file to write, .svg or .png")
    options = parser.parse_args(argv)
    series: dict[str, tuple[Sequence[float], Sequence[float]]] = {}
    for path in options.records:
        record = json.loads(path.read_text())
        found = training_curves(record.get("trainings", record), options.figure)
        if twice := sorted(series.keys() & found.keys()):
            parser.error(f"{path}: an earlier record has a training {twice[0]!r}, too; rename one")
        series |= found
    if missing := sorted(set(options.only) - set(series)):
        parser.error(f"no record has a training {missing[0]!r}, but {', '.join(series)}")
    series = {name: series[name] for name in options.only or series}
    if not series:
        parser.error(f"there is no training with {options.figure!r}")
    lines(series, ("answer tokens seen, millions", options.figure), options.out, options.title)


if __name__ == "__main__":
    main()
