"""The cost of a step with compiled layers, beside what it consists of.

Run as `python -m examples.studies.compiled_layers.step_cost --help` says. Forms, interleaved:
"products", all linear layers alone in the form that steps use; "transformers", as many tokens after
a cache of its own; "packed" and "compiled", our forward of a tree without and with programs.
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
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.evaluation.bench.profiling import tree_of
from hf_spec.evaluation.bench.tables import Table

COUNTS = (1, 4, 16)
TIMES = 4

Step = Callable[[int], object]


@contextmanager
def products(model: PreTrainedModel, context: list[int]) -> Iterator[Step]:
    """Every linear layer once."""
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
    """As `generate()` and its assisted decoding run tokens."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor([context]), **{CACHE_NAME: cache}, use_cache=True)

    def run(count: int) -> None:
        model(torch.tensor([context[:count]]), **{CACHE_NAME: cache}, use_cache=True)
        cache.crop(-count)

    yield run


@contextmanager
def ours(model: PreTrainedModel, context: list[int], mode: str) -> Iterator[Step]:
    """A tree after the context."""
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
    """Form -> nodes -> seconds of every run but the first of each visit."""
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
    """Markdown: least and median milliseconds."""
    rows = [
        [form, *(f"{min(runs) * 1e3:.1f} / {median(runs) * 1e3:.1f}" for runs in by_count.values())]
        for form, by_count in seconds.items()
    ]
    return Table(["nodes", *map(str, COUNTS)], rows).markdown()


def main(argv: list[str] | None = None) -> None:
    """Command line; prints the table and writes every run as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    timing.add_options(parser)
    parser.add_argument("--context", type=int, default=200, help="tokens before the root")
    parser.add_argument("--repeats", type=int, default=6)
    options = parser.parse_args(argv)
    # 8-bit layers log in every call that they cast their inputs.
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
