"""`hf-spec bench`: a thin command over `hf_spec.bench.suite`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_spec.cli.method_options import Assistants, PerTask, Prompts
from hf_spec.cli.options import AUTO, ENTRY, Device, Dtype, ModelArgument, check_out
from hf_spec.errors import OptionError
from hf_spec.installing import how_to_install

if TYPE_CHECKING:
    from hf_spec.bench.suite import Benchmark
    from hf_spec.bench.tables import Table


def bench(  # noqa: PLR0913 - one parameter an option
    model: ModelArgument,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{ENTRY}, without spaces; may be repeated; lookup by default. An assistant "
            "truncated:N is the model's own first N layers."
        ),
    ] = None,
    assistant: Assistants = None,
    prompts: Prompts = None,
    whole: Annotated[bool, typer.Option("--whole", help="A text file is one prompt.")] = False,
    per_task: PerTask = 4,
    task: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.")] = None,
    multi_turn: Annotated[
        bool, typer.Option("--multi-turn", help="All turns of a prompt, as a conversation.")
    ] = False,
    batch: Annotated[list[int], typer.Option(min=1, help="Rows of a call; may be repeated.")] = [1],  # noqa: B006 - typer copies it
    new_tokens: Annotated[int, typer.Option(min=1, help="At most, per row.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Timed repetitions.")] = 3,
    sample: Annotated[
        bool, typer.Option("--sample/--greedy", help="Sampled outputs are not compared.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(min=0.01, help="With --sample; 1 by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="With --sample.")] = 0,
    baselines: Annotated[
        bool, typer.Option(help="Also measure the lookups and assistants of others.")
    ] = True,
    compiled: Annotated[
        bool, typer.Option("--compiled", help="Also plain generate, static cache and compiled.")
    ] = False,
    match_length: Annotated[int, typer.Option(min=1, help="N-gram of the others' lookups.")] = 2,
    copy_length: Annotated[int, typer.Option(min=1, help="Tokens that these copy.")] = 10,
    oracle: Annotated[
        str | None, typer.Option(help="A draft model: chains of it that end where they must.")
    ] = None,
    synthetic_acceptance: Annotated[
        float | None,
        typer.Option(
            min=0, max=1, help="Also drafts that are right with this probability, of no drafter."
        ),
    ] = None,
    synthetic_length: Annotated[int, typer.Option(min=1, help="Tokens of such a draft.")] = 5,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also where the time of a step goes.")
    ] = False,
    dtype: Dtype = AUTO,
    device: Device = None,
    out: Annotated[Path | None, typer.Option(help="JSON file, whole after every prompt.")] = None,
    as_markdown: Annotated[
        bool, typer.Option("--markdown", help="Print the tables as Markdown.")
    ] = False,
    plots: Annotated[Path | None, typer.Option(help="Folder; also times forwards by size.")] = None,
) -> None:
    """Measure strategies against plain generate() and what others offer, on your own prompts.

    All contenders run in one process, prompt by prompt, in turn, so that a change of the machine's
    speed meets every one of them.

        hf-spec bench MODEL --strategy lookup --strategy falcon@HEAD --out results.json
    """
    from hf_spec.bench.entries import parse_entries
    from hf_spec.bench.lineup import Suite
    from hf_spec.bench.suite import Benchmark
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.data.prompts import load_prompts

    if temperature is not None and not sample:
        raise OptionError(f"--temperature {temperature} needs --sample")
    check_out(out)
    if plots is not None and importlib.util.find_spec("matplotlib") is None:
        raise OptionError(f"--plots needs matplotlib: {how_to_install('bench')}")
    chosen = strategy or ([] if synthetic_acceptance is not None else ["lookup"])
    entries = parse_entries(chosen, assistant or [])
    suite = Suite(
        batch_sizes=tuple(dict.fromkeys(batch)),
        new_tokens=new_tokens,
        repeats=repeats,
        temperature=(temperature or 1.0) if sample else None,
        seed=seed,
        baselines=baselines,
        compiled=compiled,
        match_length=match_length,
        copy_length=copy_length,
        oracle=oracle,
        synthetic=(
            None if synthetic_acceptance is None else (synthetic_acceptance, synthetic_length)
        ),
        multi_turn=multi_turn,
        profile=profile,
        step_cost=plots is not None,
    )
    texts = load_prompts(prompts, per_task, task or (), whole)
    target = load_target(model, dtype, device)
    benchmark = Benchmark(target, load_tokenizer(model), texts, entries, suite)
    facts = {"command": f"hf-spec {' '.join(sys.argv[1:])}", "model": model}
    show(run_and_write(benchmark, facts, out, plots), as_markdown)


def run_and_write(
    benchmark: Benchmark, facts: Mapping[str, Any], out: Path | None, plots: Path | None
) -> dict[str, Any]:
    """Measure with a progress bar, and return the results as in the file.

    Args:
        benchmark: what is measured.
        facts: put before everything else: the command and the model.
        out: JSON file, whole after every batch; None for none.
        plots: folder; None for none.
    """
    from tqdm import tqdm

    from hf_spec.files import write_json

    report: dict[str, Any] = {}
    with tqdm(total=benchmark.num_runs, unit="run", disable=None) as bar:
        for results in benchmark.run(bar.update):
            report = results.to_dict(**facts)
            if out is not None:
                write_json(out, report)
    if plots is not None:
        from hf_spec.bench.plots import draw

        draw(report, plots)
    return report


def show(report: Mapping[str, Any], as_markdown: bool = False) -> None:
    """Print the tables: drawn on a terminal, in columns of text into a pipe, or as Markdown."""
    from rich.console import Console

    from hf_spec.bench.report import SYNTHETIC, markdown, sections, text
    from hf_spec.bench.summary import notice

    console = Console(highlight=False)
    if as_markdown or not console.is_terminal:
        typer.echo(markdown(report) if as_markdown else text(report))
        return
    if said := notice(report):
        console.print(said + SYNTHETIC, style="bold yellow", markup=False)
    for title, tables in sections(report).items():
        console.rule(title)
        console.print(*map(_drawn, tables), sep="\n")


def _drawn(table: Table) -> Any:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, (heading, *cells) in enumerate(zip(table.head, *table.rows, strict=True)):
        # Where it is narrow, headings are broken into lines before figures are.
        width = max(map(len, cells))
        drawn.add_column(Text(heading), justify="right" if place else "left", min_width=width)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
