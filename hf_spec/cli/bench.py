"""`hf-spec bench`, a thin command over `hf_spec.evaluation.bench.suite`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hf_spec.cli import options
from hf_spec.common.errors import OptionError
from hf_spec.common.installing import how_to_install
from hf_spec.evaluation.settings import Suite

if TYPE_CHECKING:
    from hf_spec.evaluation.bench.suite import Benchmark

# Prompts of each task of this package.
PER_TASK = 4


@options.from_settings
def bench(  # noqa: PLR0913 - one parameter per option
    *,
    model: options.ModelArgument,
    strategy: options.Strategies = None,
    assistant: options.Assistants = None,
    prompts: options.Prompts = None,
    whole: Annotated[bool, typer.Option("--whole", help="Read a text file as one prompt.")] = False,
    per_task: Annotated[
        int | None, typer.Option(min=1, help=options.PER_TASK_HELP.format(PER_TASK))
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Only this task; may be repeated.")] = None,
    suite: Suite,
    out: options.Out = None,
    as_markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    plots: Annotated[
        Path | None, typer.Option(help="Folder for plots, also of forward passes.")
    ] = None,
    placement: options.Placement,
) -> None:
    """Benchmark strategies against plain generate().

    Plain generate() and none always run, too; the default strategy is lookup.

        hf-spec bench MODEL --strategy falcon@HEAD --out results.json
    """
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts
    from hf_spec.evaluation.bench.suite import Benchmark
    from hf_spec.methods.entries import parse_entries, with_baseline

    options.check_out(out, prompts)
    if plots is not None and plots.exists() and not plots.is_dir():
        raise OptionError(f"--plots {plots} is a file; use a new or existing folder")
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise OptionError(f"--plots needs matplotlib: {how_to_install('bench')}")
    default = ["lookup"] if suite.synthetic_acceptance is None else []
    entries = with_baseline(parse_entries(strategy or default, assistant or []))
    limit = options.prompts_per_task(per_task, prompts, PER_TASK)
    texts = load_prompts(prompts, limit, task or (), whole)
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    suite = replace(suite, step_cost=plots is not None)
    benchmark = Benchmark(target, tokenizer, texts, entries, suite)
    facts = {"command": f"hf-spec {' '.join(sys.argv[1:])}", "model": model}
    show(run_and_write(benchmark, facts, out, plots), as_markdown)


def run_and_write(
    benchmark: Benchmark, facts: Mapping[str, Any], out: Path | None, plots: Path | None
) -> dict[str, Any]:
    """Run a benchmark with a progress bar and return the results, after `facts`.

    Results are written to the JSON file `out` after every batch, and plotted into `plots`.
    """
    from tqdm import tqdm

    from hf_spec.common.files import write_json

    report: dict[str, Any] = {}
    with tqdm(total=benchmark.num_runs, unit="run", disable=None) as bar:
        for results in benchmark.run(bar.update):
            report = results.to_dict(**facts)
            if out is not None:
                write_json(out, report)
    if plots is not None:
        from hf_spec.evaluation.bench.plots import draw

        draw(report, plots)
    return report


def show(report: Mapping[str, Any], as_markdown: bool = False) -> None:
    """Print the tables: drawn in a terminal, as plain text into a pipe, or as Markdown."""
    from hf_spec.evaluation.bench.report import SYNTHETIC, markdown, sections, text
    from hf_spec.evaluation.bench.summary import notice

    console = Console(highlight=False)
    if as_markdown or not console.is_terminal:
        typer.echo(markdown(report) if as_markdown else text(report))
        return
    if synthetic := notice(report):
        console.print(synthetic + SYNTHETIC, style="bold yellow", markup=False)
    for title, tables in sections(report).items():
        console.rule(title)
        console.print(*(table.drawn() for table in tables), sep="\n")
