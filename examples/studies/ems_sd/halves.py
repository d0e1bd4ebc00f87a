"""Time saved by each half of EMS-SD in a forward pass: unpadded inputs, and unpadded KV cache.

In the paper, the unpadded KV cache saves more, on an A100 (Ni et al. 2024, arXiv 2405.07542, table
2). Here one verification of a ragged batch is timed with either kind of padding, both and none.
Half of the rows send a draft of seven tokens, the others only their last token. Before that, one
row is `gap` tokens ahead of the others, so the aligned cache of the others has a gap of that width.
For usage, run `python -m examples.studies.ems_sd.halves --help`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from examples.studies.timing import add_options, begin, write_record
from hf_spec.common.tables import Table
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.runner import ModelRunner

DRAFTED = 7
MODES = ("padded", "unpadded_input", "unpadded_kv", "unpadded")


@dataclass(frozen=True)
class Case:
    """Ragged batch of `rows` with `context` cached tokens each, one of them with `gap` more."""

    rows: int
    gap: int
    context: int


def verify(
    model: PreTrainedModel, mode: str, case: Case, clock: Callable[[], float], times: int
) -> tuple[int, list[float]]:
    """Return the tokens that one verification runs, and the seconds of `times` in a row."""
    rows, vocab = case.rows, model.config.get_text_config().vocab_size
    shape = (rows, case.context + case.gap + times + DRAFTED + 2)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(3, vocab, shape, generator=generator).tolist()
    runner = ModelRunner(model, rows, batching=mode)
    lengths = [case.context] * rows

    def run(drafted: Sequence[int]) -> tuple[int, float]:
        ends = [length + more for length, more in zip(lengths, drafted, strict=True)]
        chains = [
            (text[length - 1 : end], [*range(-1, more)])
            for text, length, end, more in zip(texts, lengths, ends, drafted, strict=True)
        ]
        known = [text[:length] for text, length in zip(texts, lengths, strict=True)]
        before, start = runner.tokens_run, clock()
        runner.forward(DraftTree.from_rows(chains), known)
        return runner.tokens_run - before, clock() - start

    with torch.no_grad(), runner.active():
        run([case.gap, *[0] * (rows - 1)])
        runner.keep([[*range(1, case.gap + 1)], *[[]] * (rows - 1)])
        lengths = [length + 1 for length in lengths]
        lengths[0] += case.gap
        found = []
        for _ in range(times):
            found.append(run([DRAFTED * (row % 2) for row in range(rows)]))
            runner.keep([[]] * rows)
            lengths = [length + 1 for length in lengths]
    return found[-1][0], [seconds for _, seconds in found]


def measure(
    model: PreTrainedModel,
    clock: Callable[[], float],
    cases: Sequence[Case],
    repeats: int,
    times: int = 5,
) -> list[dict[str, Any]]:
    """Return one record per case, mode and repetition: median seconds of a verification.

    The first repetition and the first forward pass of each are warm-up and not recorded.
    """
    records = []
    for repeat, case, mode in product(range(repeats + 1), cases, MODES):
        tokens, seconds = verify(model, mode, case, clock, times)
        found = {**asdict(case), "mode": mode, "tokens": tokens, "seconds": median(seconds[1:])}
        records += [{**found, "repeat": repeat - 1}] if repeat else []
    return records


def summary(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return milliseconds of each mode per batch size and gap, medians over repetitions."""
    rows = []
    for size, gap in dict.fromkeys((record["rows"], record["gap"]) for record in records):
        mine = [one for one in records if (one["rows"], one["gap"]) == (size, gap)]
        by_mode = {mode: [one for one in mine if one["mode"] == mode] for mode in MODES}
        rows.append(
            {
                "rows": size,
                "gap": gap,
                "ms": {
                    m: 1e3 * median(r["seconds"] for r in found) for m, found in by_mode.items()
                },
                "tokens": {mode: found[0]["tokens"] for mode, found in by_mode.items()},
            }
        )
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary as a Markdown table."""
    columns: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "batch": lambda row: str(row["rows"]),
        "gap": lambda row: str(row["gap"]),
        "tokens run: padded inputs": lambda row: str(row["tokens"]["padded"]),
        "unpadded": lambda row: str(row["tokens"]["unpadded"]),
        "ms: `padded`": lambda row: f"{row['ms']['padded']:.0f}",
        **{f"`{mode}`": _milliseconds(mode) for mode in MODES[1:]},
        "unpadded inputs save": lambda row: _saved(row, "unpadded_input"),
        "unpadded keys and values save": lambda row: _saved(row, "unpadded_kv"),
    }
    return Table.of(columns, rows).markdown()


def _milliseconds(mode: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda row: f"{row['ms'][mode]:.0f}"


def _saved(row: Mapping[str, Any], mode: str) -> str:
    return f"{1 - row['ms'][mode] / row['ms']['padded']:.0%}"


def main(argv: list[str] | None = None) -> None:
    """Run the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--gaps", type=int, nargs="+", default=[0, 64, 256], help="entries")
    parser.add_argument("--context", type=int, default=64, help="tokens that every row has read")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(argv)
    model, clock = begin(options)
    cases = [Case(*case, options.context) for case in product(options.batch_sizes, options.gaps)]
    records = measure(model, clock, cases, options.repeats)
    rows = summary(records)
    print(table(rows))
    write_record(options, {"summary": rows, "records": records})


if __name__ == "__main__":
    main()
