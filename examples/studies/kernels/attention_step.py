"""A target step on a CPU by rows, nodes and context: attention by PyTorch, and by our kernel.

Run as `python -m examples.studies.kernels.attention_step --help` says. Both forms run in turn on
the same rows; all else of a step, products above all, is the same. What they compute is compared
before anything is timed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

import torch
from hf_spec_kernels import using
from transformers import PreTrainedModel

from examples.studies import timing
from examples.studies.kernels.step_time import Steps, check
from hf_spec.evaluation.bench.tables import Table

# Rows, nodes of each, and committed tokens of each.
SHAPES = (
    *((1, 1, 200), (1, 16, 200), (1, 8, 1000), (1, 1, 4000)),
    *((8, 1, 200), (16, 1, 200), (16, 4, 200), (32, 1, 600)),
)
# What "auto" of the kernels means while a form runs.
FORMS = {"PyTorch": "torch", "our kernel": "auto"}


@torch.no_grad()
def measure(
    model: PreTrainedModel, shape: Sequence[int], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Form -> the seconds of every step of a shape."""
    rows, nodes, context = shape
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    texts = torch.randint(3, vocab, (rows, context), generator=generator).tolist()
    forms = {form: Steps(model, texts, nodes, clock) for form in FORMS}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    # The first step runs the context as well.
    with ExitStack() as stack:
        for steps in forms.values():
            stack.enter_context(steps.runner.active())
        for step in range(repeats + 1):
            found = []
            for form, steps in forms.items():
                with using(FORMS[form]):
                    spent, logits = steps.run()
                seconds[form] += [spent] if step else []
                found.append(logits)
            check(*found)
    return seconds


def table(records: Sequence[dict[str, object]]) -> str:
    """Markdown: least and median milliseconds of both forms, and the ratio of the least."""
    lines = []
    for record in records:
        seconds = record["seconds"]
        assert isinstance(seconds, dict)
        runs = [seconds[form] for form in FORMS]
        figures = [f"{min(mine) * 1e3:.1f} / {median(mine) * 1e3:.1f}" for mine in runs]
        ratio = f"{min(runs[0]) / min(runs[1]):.2f}"
        lines.append(
            [*(str(record[name]) for name in ("rows", "nodes", "context")), *figures, ratio]
        )
    return Table(["rows", "nodes", "context", *FORMS, "ratio"], lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every step as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument(
        "--shape", type=int, nargs=3, action="append", metavar=("ROWS", "NODES", "CONTEXT")
    )
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args(argv)
    model, clock = timing.begin(options)
    records: list[dict[str, object]] = []
    for shape in options.shape or SHAPES:
        seconds = measure(model, shape, options.repeats, clock)
        names = dict(zip(("rows", "nodes", "context"), shape, strict=True))
        records.append({**names, "seconds": seconds})
    print(table(records))
    timing.write_record(options, {"steps": records})


if __name__ == "__main__":
    main()
