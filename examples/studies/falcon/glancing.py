"""Measure if glancing (CSGD) helps, by attention layers and loss at replaced positions.

Trains a Falcon head for every combination of attention layers, schedule, and seed on the same data.
Schedules: no replaced inputs ("off"); a share of replaced inputs that falls to zero, with a loss at
the replaced positions as in the paper ("learned") or without one ("unlearned"). See Gao et al.
2024, arXiv 2412.12639, tables 4 and 5. Each seed is finished before the next one starts. The record
is written after every training, and the same command resumes an interrupted study. Run as
`python -m examples.studies.falcon.glancing --model MODEL --responses ANSWERS.jsonl --work FOLDER
--out RECORD.json`; options after `--` are those of `hf-spec train falcon`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

from examples.studies import trainings
from examples.studies.falcon.whole_training import run_part
from hf_spec.common.files import write_json
from hf_spec.common.tables import Table

CSGD = {
    "off": ["--csgd", "off"],
    "learned": ["--csgd", "steps"],
    "unlearned": ["--csgd", "steps", "--no-learn-replaced"],
}
# Same for all trainings; the loss weights are those of the shipped heads.
COMMON = ["--num-train-epochs", "2", "--soft-weight", "1", "--hard-weight", "0.1"]
ADAPTER = "adapter_config.json"


def commands(options: argparse.Namespace) -> Iterator[tuple[str, list[str]]]:
    """Yield the name of every training and its `hf-spec` arguments, seed by seed."""
    answers = [word for path in options.responses for word in ("--responses", str(path))]
    for seed, layers, csgd in product(range(options.seeds), options.layers, options.csgd):
        name = f"k{options.block_size}-l{layers}-{csgd}-{seed}"
        words = ["train", "falcon", options.model, *answers, "--out", str(options.work / name)]
        words += ["--block-size", str(options.block_size), "--num-layers", str(layers)]
        words += ["--dtype", options.dtype, "--seed", str(seed), *CSGD[csgd]]
        yield name, [*words, *COMMON, *options.train]


def table(finished: Mapping[str, Any]) -> str:
    """Return a Markdown table of the held-out tau of one pass: mean and range over seeds."""
    rows = []
    for kind, taus in trainings.by_kind(finished, "tau").items():
        block, layers, csgd = kind.split("-")
        minutes = [one["minutes"] for name, one in finished.items() if name.startswith(kind)]
        spread = f"{min(taus):.3f} - {max(taus):.3f}"
        cells = [block[1:], layers[1:], csgd, str(len(taus)), f"{mean(taus):.3f}", spread]
        rows.append([*cells, f"{mean(minutes):.1f}"])
    heads = ["k", "attention layers", "CSGD", "seeds", "tau of one pass", "range"]
    return Table([*heads, "minutes per training"], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True, help="folder or Hub id")
    parser.add_argument("--responses", type=Path, action="append", required=True)
    parser.add_argument("--work", type=Path, required=True, help="folder of the trained heads")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    parser.add_argument("--block-size", type=int, default=2, help="the paper's k")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--csgd", nargs="+", choices=CSGD, default=list(CSGD))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, help="start no further training after this time")
    parser.add_argument("train", nargs="*", help="options of hf-spec train falcon")
    options = parser.parse_args(argv)
    end = time.monotonic() + (options.seconds or float("inf"))
    finished: dict[str, Any] = {}
    for name, words in commands(options):
        folder = options.work / name
        if not (folder / ADAPTER).exists():
            if time.monotonic() > end:
                continue
            print("hf-spec", *words, flush=True)
            run_part(words)
        finished[name] = trainings.read(folder)
        about = "Falcon heads with and without CSGD, by attention layers and seed"
        write_json(options.out, {"about": about, "trainings": finished})
    print(table(finished))


if __name__ == "__main__":
    main()
