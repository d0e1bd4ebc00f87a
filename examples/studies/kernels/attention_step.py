"""Time a target step on a CPU by rows, nodes and context, with PyTorch's attention and our kernel.

Run `python -m examples.studies.kernels.attention_step --help` for the options. Both forms alternate
on the same rows; everything else in a step, mainly matmuls, is the same. The logits of each step
are compared. Finally, the kernel is timed without the rest of the step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from statistics import median

import torch
from hf_spec_kernels import ragged_tree_attention, using
from transformers import PreTrainedModel

from examples.studies import timing
from examples.studies.kernels.step_time import Steps, check
from examples.studies.kernels.tree_attention import Heads, make_problem
from hf_spec.common.tables import Table
from hf_spec.training.heads import layer_config

# Rows, nodes per row, and committed tokens per row.
SHAPES = (
    *((1, 1, 200), (1, 16, 200), (1, 8, 1000), (1, 1, 4000)),
    *((8, 1, 200), (16, 1, 200), (16, 4, 200), (32, 1, 600)),
)
# Kernel implementation of each form.
FORMS = {"PyTorch": "torch", "our kernel": "auto"}
ALONE = "the kernel alone"


@torch.no_grad()
def measure(
    model: PreTrainedModel, shape: Sequence[int], repeats: int, clock: Callable[[], float]
) -> dict[str, list[float]]:
    """Return form -> seconds of every step of a shape."""
    rows, nodes, context = shape
    generator = torch.Generator().manual_seed(0)
    vocab = model.config.get_text_config().vocab_size
    texts = torch.randint(3, vocab, (rows, context), generator=generator).tolist()
    forms = {form: Steps(model, texts, nodes, clock) for form in FORMS}
    seconds: dict[str, list[float]] = {form: [] for form in FORMS}
    # The first step also runs the context and is not timed.
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


@torch.no_grad()
def attention_alone(
    model: PreTrainedModel, shape: Sequence[int], repeats: int, clock: Callable[[], float]
) -> list[float]:
    """Return the seconds of the kernel for all layers and rows, each with its own KV cache."""
    rows, nodes, context = shape
    num_layers = model.config.get_text_config().num_hidden_layers
    sizes = layer_config(model, mlp_size=None, num_layers=num_layers)
    heads = Heads(
        sizes["num_attention_heads"],
        sizes["num_key_value_heads"],
        sizes["head_dim"],
        str(model.dtype).removeprefix("torch."),
    )
    problems = [
        make_problem(nodes, context, heads, torch.device("cpu")) for _ in range(rows * num_layers)
    ]
    seconds = []
    for _ in range(repeats + 1):
        start = clock()
        for problem in problems:
            ragged_tree_attention(problem.query, problem.keys, problem.values, problem.layout)
        seconds.append(clock() - start)
    return seconds[1:]


def table(records: Sequence[dict[str, object]]) -> str:
    """Return Markdown: minimum and median milliseconds, speedup, and the kernel's share."""
    lines = []
    for record in records:
        seconds = record["seconds"]
        assert isinstance(seconds, dict)
        runs = [seconds[form] for form in (*FORMS, ALONE)]
        figures = [f"{min(mine) * 1e3:.1f} / {median(mine) * 1e3:.1f}" for mine in runs]
        ratio = f"{min(runs[0]) / min(runs[1]):.2f}"
        share = f"{min(runs[2]) / min(runs[1]):.1%}"
        sizes = (str(record[name]) for name in ("rows", "nodes", "context"))
        lines.append([*sizes, *figures, ratio, share])
    heads = ["rows", "nodes", "context", *FORMS, ALONE, "ratio", "share"]
    return Table(heads, lines).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every step as JSON."""
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
        seconds[ALONE] = attention_alone(model, shape, options.repeats, clock)
        names = dict(zip(("rows", "nodes", "context"), shape, strict=True))
        records.append({**names, "seconds": seconds})
    print(table(records))
    timing.write_record(options, {"steps": records})


if __name__ == "__main__":
    main()
