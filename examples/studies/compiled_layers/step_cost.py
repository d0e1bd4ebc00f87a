"""The cost of a decoding step with compiled layers, and of its parts.

Run `python -m examples.studies.compiled_layers.step_cost --help` for the options. Four forms are
interleaved: "products", only the linear layers, with the packed weights that steps use;
"transformers", the same number of tokens with its own cache; "packed" and "compiled", our forward
pass over a tree without and with compiled layers.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel

import hf_spec
from examples.studies import timing
from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.tables import Table
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.evaluation.bench.profiling import tree_of

COUNTS = (1, 4, 16)
TIMES = 4

Step = Callable[[int], object]


@contextmanager
def products(model: PreTrainedModel, context: list[int]) -> Iterator[Step]:
    """Yield a function that runs every linear layer once."""
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]

    def run(count: int) -> None:
        for linear in linears:
            linear(states[linear.in_features, count])

    widths = {linear.in_features for linear in linears}
    states = {(w, n): torch.ones(1, n, w, dtype=model.dtype) for w in widths for n in COUNTS}
    with install_packed_linears(model), use_packed_linears():
        yield run


@contextmanager
def transformers(model: PreTrainedModel, context: list[int]) -> Iterator[Step]:
    """Yield a function that runs tokens as `generate()` and its assisted decoding do."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([context]), **{CACHE_NAME: cache}, use_cache=True)

    def run(count: int) -> None:
        model(torch.tensor([context[:count]]), **{CACHE_NAME: cache}, use_cache=True)
        cache.crop(-count)

    yield run


@contextmanager
def ours(model: PreTrainedModel, context: list[int], mode: str) -> Iterator[Step]:
    """Yield a function that runs a tree after the context."""
    hf_spec.compile(model, mode)
    runner = hf_spec.ModelRunner(model, 1)
    with runner.active():
        runner.forward(tree_of(1, context[-1:]), [context])
        runner.keep([[]])

        def run(count: int) -> None:
            runner.forward(tree_of(count, context), [[*context, context[0]]])
            runner.keep([[]])
            runner.shorten(0, len(context))

        yield run


FORMS: dict[str, Any] = {
    "products": products,
    "transformers": transformers,
    "packed": lambda model, context: ours(model, context, "off"),
    "compiled": lambda model, context: ours(model, context, "on"),
}


@torch.no_grad()
def measure(
    model: PreTrainedModel, context: list[int], repeats: int, clock: Callable[[], float]
) -> dict[str, dict[int, list[float]]]:
    """Return form -> nodes -> seconds of every run; the first run of each turn is a warm-up."""
    seconds: dict[str, dict[int, list[float]]] = {
        form: {count: [] for count in COUNTS} for form in FORMS
    }
    for _ in range(repeats):
        for form, make in FORMS.items():
            with make(model, context) as run:
                for count in COUNTS:
                    run(count)
                    for _ in range(TIMES):
                        start = clock()
                        run(count)
                        seconds[form][count].append(clock() - start)
    return seconds


def table(seconds: dict[str, dict[int, list[float]]]) -> str:
    """Return a Markdown table of minimum and median milliseconds."""
    rows = [
        [form, *(f"{min(runs) * 1e3:.1f} / {median(runs) * 1e3:.1f}" for runs in by_count.values())]
        for form, by_count in seconds.items()
    ]
    return Table(["nodes", *map(str, COUNTS)], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Run the command line; print the table and write every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--context", type=int, default=200, help="tokens before the root")
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args(argv)
    # 8-bit layers log a warning about cast inputs at every call.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    model, clock = timing.begin(options)
    vocab = model.config.get_text_config().vocab_size
    generator = torch.Generator().manual_seed(0)
    context = torch.randint(3, vocab, (options.context,), generator=generator).tolist()
    report = hf_spec.compile(model)
    print(report)
    seconds = measure(model, context, options.repeats, clock)
    print(table(seconds))
    record = {"context": options.context, "compile": asdict(report), "seconds": seconds}
    timing.write_record(options, record)


if __name__ == "__main__":
    main()
