"""`hf-spec calibrate ...`: thin commands over this package."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_spec.cli.next_step import bench_command
from hf_spec.cli.options import AUTO, Device, Dtype, ModelOption
from hf_spec.cli.train.common import Responses

if TYPE_CHECKING:
    from hf_spec.adapters.folder import SpecAdapter

calibrate = typer.Typer(no_args_is_help=True, help="Choose options by measured speed.")


@calibrate.command("disco")
def calibrate_disco_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    adapter: Annotated[Path, typer.Option(exists=True, help="The folder of `train disco`.")],
    prompts: Annotated[
        Path,
        typer.Option(exists=True, help="JSON lines; those held back in training are used."),
    ],
    use_all: Annotated[
        bool, typer.Option("--all", help="Use every prompt, for a file of validation prompts.")
    ] = False,
    max_prompts: Annotated[int, typer.Option(min=1, help="At most so many prompts.")] = 12,
    threshold: Annotated[
        list[float] | None, typer.Option(min=0, max=1, help="To be tried; may be repeated.")
    ] = None,
    longest: Annotated[
        list[int] | None, typer.Option(min=1, help="Longest draft to be tried; may be repeated.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Generated per run.")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each way and prompt.")] = 2,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Choose DISCO's threshold and longest draft by speed on this machine.

    Tries every pair, in turn with static lengths, on prompts that the classifier was not trained
    on, and writes the fastest pair and the table into the adapter. Leave the machine alone
    meanwhile.

        hf-spec calibrate disco --model MODEL --adapter my-disco --prompts prompts.jsonl
    """
    from tqdm import tqdm

    from hf_spec.adapters.folder import load_adapter
    from hf_spec.bench.calibrate.disco import (
        CalibrationSettings,
        calibrate_disco,
        validation_prompts,
    )
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.data.prompts import load_prompts
    from hf_spec.models.disco_classifier import METHOD

    base = CalibrationSettings()
    settings = CalibrationSettings(
        thresholds=tuple(threshold or base.thresholds),
        longest=tuple(longest or base.longest),
        new_tokens=new_tokens,
        repeats=repeats,
    )
    known = load_prompts(prompts)
    chosen = known if use_all else validation_prompts(load_adapter(adapter, METHOD), known)
    chosen = chosen[:max_prompts]
    target, tokenizer = load_target(model, dtype, device), load_tokenizer(model)
    total = settings.num_ways * len(chosen) * settings.repeats
    with tqdm(total=total, desc="runs", disable=None) as bar:
        made = calibrate_disco(target, tokenizer, adapter, chosen, settings, progress=bar.update)
    _show_ways(made)
    typer.echo(f"next: {bench_command(model, f'disco@{adapter}', dtype, device)}")


@calibrate.command("falcon")
def calibrate_falcon_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    adapter: Annotated[Path, typer.Option(exists=True, help="The folder of `train falcon`.")],
    responses: Responses,
    max_answers: Annotated[int, typer.Option(min=1, help="The first so many answers.")] = 100,
    depth: Annotated[int, typer.Option(min=1, help="Of the deepest path tried.")] = 6,
    num_ranks: Annotated[int, typer.Option(min=1, help="Length of the lists that count.")] = 8,
    max_nodes: Annotated[int, typer.Option(min=1, help="Most that are sent to the target.")] = 40,
    drafted_nodes: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Trees that are sent in part; may be repeated. 24 and 48."),
    ] = None,
    generations: Annotated[int, typer.Option(min=1, help="From which these are judged.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=2, help="Generated per timed run.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Timed runs of each tree.")] = 3,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Choose a Falcon head's tree by acceptance and by speed on this machine.

    Reads off answers that the head was not trained on how often each path would be accepted, times
    rounds with trees of several sizes, and writes the tree with the most tokens per second, and how
    many of its nodes are worth sending, into the adapter, which model.generate(...,
    spec_strategy="falcon", assistant=ADAPTER) then drafts. Leave the machine alone meanwhile.

        hf-spec calibrate falcon --model MODEL --adapter my-head --responses others.jsonl
    """
    from tqdm import tqdm

    from hf_spec.bench.calibrate.falcon import TreeSettings, calibrate_falcon
    from hf_spec.cli.loading import load_target
    from hf_spec.training.responses import read_responses

    settings = TreeSettings(
        depth=depth,
        num_ranks=num_ranks,
        max_nodes=max_nodes,
        drafted_nodes=tuple(drafted_nodes or TreeSettings.drafted_nodes),
        generations=generations,
        new_tokens=new_tokens,
        repeats=repeats,
    )
    answers = list(islice(read_responses(responses), max_answers))
    target = load_target(model, dtype, device)
    with tqdm(desc="answers and runs", disable=None) as bar:
        made = calibrate_falcon(target, adapter, answers, settings, progress=bar.update)
    _show_tree(made)
    typer.echo(f"next: {bench_command(model, f'falcon@{adapter}', dtype, device)}")


def _show_ways(adapter: SpecAdapter) -> None:
    """Speeds, and what was chosen."""
    from rich.console import Console
    from rich.table import Table

    calibration = adapter.options["calibration"]
    table = Table(title=f"speed relative to drafts of {calibration['reference']} tokens")
    for column in ("", "median", "p20 - p80", "tau"):
        table.add_column(column)
    for name, row in calibration["table"].items():
        spread = f"{row['ratio_p20']:.2f} - {row['ratio_p80']:.2f}"
        chosen = " <" if name in {calibration["best"], calibration["best_static"]} else ""
        table.add_row(name + chosen, f"{row['ratio']:.2f}", spread, f"{row['tau']:.2f}")
    Console().print(table)


def _show_tree(adapter: SpecAdapter) -> None:
    """The trees that were tried, and the costs that decided."""
    from rich.console import Console
    from rich.table import Table

    calibration = adapter.options["calibration"]
    table = Table(title="the likeliest paths of every tree")
    for column in ("drafted nodes", "depth", "sent", "tau", "tokens / s"):
        table.add_column(column)
    for index, one in enumerate(calibration["choices"]):
        *figures, rate = (f"{value:g}" for value in one.values())
        table.add_row(*figures, rate + (" <" if index == calibration["best"] else ""))
    Console().print(table)
    table = Table(title="time of a round")
    for column in ("", "ms a round"):
        table.add_column(column)
    for kind, unit in (("verify", "nodes"), ("draft", "passes")):
        for count, seconds in calibration["seconds"][kind].items():
            table.add_row(f"{kind} {count} {unit}", f"{1000 * seconds:.2f}")
    Console().print(table)
