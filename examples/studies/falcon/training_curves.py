"""Learning curves of recorded trainings: a figure of their evaluations over the tokens seen.

Run as `python -m examples.studies.falcon.training_curves RECORDS.json --out plot.svg`, on records
such as `examples/studies/falcon/smollm2_falcon_training.json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_spec.bench.plots import Series, lines


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
