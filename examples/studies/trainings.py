"""Collect finished trainings in one record: settings, duration, and evaluations.

A training writes `run.json` and `metrics.jsonl` to the `training` folder of its output. Run as
`python -m examples.studies.trainings FOLDER ... --out RECORD.json`; trainings are named after their
folders.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from statistics import mean
from typing import Any

from hf_spec.common.files import write_json
from hf_spec.training.trainer import METRICS, RUN

# Keys of every step; steps with an evaluation have more.
OF_EVERY_STEP = {"step", "loss", "seconds", "tokens", "rate"}
# Cumulative number of answer tokens trained on.
SEEN = "answer_tokens"


def read(folder: Path, before: int = 0) -> dict[str, Any]:
    """Return settings, packages, minutes of all steps, and evaluations of one training.

    Each evaluation has the cumulative number of answer tokens, starting at `before`.
    """
    trained = folder / "training"
    last = json.loads((trained / RUN).read_text())["starts"][-1]
    steps = [json.loads(line) for line in (trained / METRICS).read_text().splitlines()]
    seen = accumulate((step["tokens"] for step in steps), initial=before)
    next(seen)
    evaluations = [
        {SEEN: tokens, **{n: step[n] for n in step if n not in OF_EVERY_STEP - {"step"}}}
        for step, tokens in zip(steps, seen, strict=True)
        if set(step) > OF_EVERY_STEP
    ]
    return {
        **{name: last[name] for name in ("settings", "environment", "packages")},
        "steps": len(steps),
        "minutes": round(sum(step["seconds"] for step in steps) / 60, 1),
        "evaluations": evaluations,
    }


def by_kind(trainings: Mapping[str, Any], figure: str) -> dict[str, list[float]]:
    """Return the final values of a figure, grouped by training name without a trailing seed."""
    found = defaultdict(list)
    for name, training in trainings.items():
        kind = name.rpartition("-")[0] if name[-1].isdigit() else name
        found[kind].append(training["evaluations"][-1][figure])
    return dict(found)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the mean and range of the final values by kind of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, help="what trainings wrote")
    parser.add_argument("--about", default="", help="a sentence for the record")
    parser.add_argument("--before", type=int, default=0, help="answer tokens seen in earlier runs")
    parser.add_argument("--figure", default="tau", help="what is printed")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args(argv)
    trainings = {folder.name: read(folder, options.before) for folder in options.folders}
    for kind, ends in by_kind(trainings, options.figure).items():
        print(f"{kind}: {mean(ends):.3f} ({min(ends):.3f} - {max(ends):.3f})")
    write_json(options.out, {"about": options.about, "trainings": trainings})


if __name__ == "__main__":
    main()
