"""Compare a decoding step without a draft with a plain read of its weights.

Decoding one sequence reads every weight of the decoder layers and of the output head once per
token, so no step is faster than that. Answers of two lengths alternate with reads of the same
number of bytes by `torch.sum`. The time of a step is the difference between the answers, per
additional token. Run as
`python -m examples.studies.kernels.memory_floor --model MODEL --dtype bfloat16 --out FLOOR.json`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import nn

import hf_spec
from examples.studies import timing
from examples.studies.kernels.four_bit import read_seconds
from hf_spec.common.tables import Table

PROMPT, SHORT, LONG = 16, 8, 72


def step_bytes(model: Any) -> int:
    """Return the bytes of all linear layers; a step reads each once."""
    weights = {
        layer.weight.data_ptr(): layer.weight.nbytes
        for layer in model.modules()
        if isinstance(layer, nn.Linear)
    }
    return sum(weights.values())


def measure(model: Any, repeats: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of a step and of a read for each repetition."""
    ids = torch.arange(1, PROMPT + 1)[None]
    nbytes = step_bytes(model)

    def answer(tokens: int) -> float:
        begin = clock()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            spec_strategy="none",
            pad_token_id=0,
        )
        return clock() - begin

    answer(LONG)
    found: dict[str, list[float]] = {"step": [], "read": []}
    for _ in range(repeats):
        short, read = answer(SHORT), min(read_seconds(nbytes, 2, clock))
        found["step"].append((answer(LONG) - short) / (LONG - SHORT))
        found["read"].append(read)
    return found


def table(found: dict[str, list[float]], nbytes: int) -> str:
    """Return Markdown with a row for the step, one for the read, and one for their ratio."""
    ratios = [step / read for step, read in zip(found["step"], found["read"], strict=True)]
    rows = [
        [
            name,
            _spread([1e3 * value for value in values], ".1f"),
            f"{nbytes / median(values) / 1e9:.1f}",
        ]
        for name, values in found.items()
    ]
    rows.append(["step / read", _spread(ratios, ".2f"), ""])
    return Table(["", "ms or ratio, median (min - max)", "GB per second"], rows).markdown()


def _spread(values: list[float], form: str) -> str:
    middle, low, high = (format(f(values), form) for f in (median, min, max))
    return f"{middle} ({low} - {high})"


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    nbytes = step_bytes(model)
    hf_spec.compile(model)
    found = measure(model, options.repeats, clock)
    print(table(found, nbytes))
    facts = {"model": timing.shown(options.model), "dtype": options.dtype, "bytes": nbytes}
    timing.write_record(options, {**facts, "seconds": found})


if __name__ == "__main__":
    main()
