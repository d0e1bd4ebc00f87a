"""`hf-spec calibrate ...`: commands for `hf_spec.evaluation.bench.calibrate`."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from hf_spec.cli import options
from hf_spec.cli.train.common import DataCommand, Responses, bench_command, show_table
from hf_spec.evaluation.settings import CalibrationSettings, TreeSettings

Adapter = Annotated[Path, typer.Option(exists=True, help="Folder of hf-spec train.")]
calibrate = typer.Typer(no_args_is_help=True, help="Tune a trained adapter to this machine.")


@calibrate.command("disco", cls=DataCommand)
@options.from_settings
def calibrate_disco_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelArgument,
    adapter: Adapter,
    prompts: Annotated[Path, typer.Option(exists=True, help="JSON lines; held-out ones are used.")],
    use_all: Annotated[bool, typer.Option("--all", help="Use all prompts.")] = False,
    max_prompts: Annotated[int, typer.Option(min=1, help="Maximum number of prompts.")] = 12,
    settings: CalibrationSettings,
    placement: options.Placement,
) -> None:
    """Choose DISCO's threshold and maximum draft length by speed on this machine.

    Measures every pair of values and static draft lengths on held-out prompts, interleaved. Writes
    the fastest pair and the table to the adapter. Run this on an otherwise idle machine.

        hf-spec calibrate disco MODEL --adapter my-disco --prompts prompts.jsonl
    """
    from tqdm import tqdm

    from hf_spec.adapters.folder import load_adapter
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts
    from hf_spec.evaluation.bench.calibrate.disco import calibrate_disco, validation_prompts
    from hf_spec.methods.disco.classifier import METHOD

    loaded = load_prompts(prompts)
    chosen = loaded if use_all else validation_prompts(load_adapter(adapter, METHOD), loaded)
    chosen = chosen[:max_prompts]
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    total = settings.num_contenders * len(chosen) * settings.repeats
    with tqdm(total=total, desc="runs", disable=None) as bar:
        result = calibrate_disco(target, tokenizer, adapter, chosen, settings, progress=bar.update)
    calibration = result.options["calibration"]
    best = {calibration["best"], calibration["best_static"]}
    show_table(
        f"speed relative to drafts of {calibration['reference']} tokens",
        ("", "median", "p20 - p80", "at one price a forward", "tau"),
        (
            (
                f"{name} <" if name in best else name,
                f"{row['ratio']:.2f}",
                f"{row['ratio_p20']:.2f} - {row['ratio_p80']:.2f}",
                f"{row['ratio_at_one_price']:.2f}",
                f"{row['tau']:.2f}",
            )
            for name, row in calibration["table"].items()
        ),
    )
    typer.echo(f"next: {bench_command(model, f'disco@{adapter}', placement)}")


@calibrate.command("falcon", cls=DataCommand)
@options.from_settings
def calibrate_falcon_command(
    *,
    model: options.ModelArgument,
    adapter: Adapter,
    responses: Responses,
    max_answers: Annotated[int, typer.Option(min=1, help="Maximum number of answers.")] = 100,
    settings: TreeSettings,
    placement: options.Placement,
) -> None:
    """Choose a Falcon head's draft tree by acceptance rate and speed on this machine.

    Measures the acceptance rate of each path on answers outside the training set, and the time of
    rounds with trees of several sizes. Writes the fastest tree and its number of verified nodes to
    the adapter, for model.generate(..., spec_strategy="falcon", assistant=ADAPTER). Run this on an
    otherwise idle machine.

        hf-spec calibrate falcon MODEL --adapter my-head --responses others.jsonl
    """
    from tqdm import tqdm

    from hf_spec.cli.loading import load_target
    from hf_spec.evaluation.bench.calibrate.falcon import calibrate_falcon
    from hf_spec.training.responses import read_responses

    answers = list(islice(read_responses(responses), max_answers))
    target = load_target(model, placement)
    with tqdm(desc="answers and runs", disable=None) as bar:
        result = calibrate_falcon(target, adapter, answers, settings, progress=bar.update)
    calibration = result.options["calibration"]
    trees = [[f"{value:g}" for value in choice.values()] for choice in calibration["choices"]]
    trees[calibration["best"]][-1] += " <"
    columns = ("drafted nodes", "depth", "sent", "tau", "tokens / s")
    show_table("trees", columns, trees)
    show_table(
        "time of a round",
        ("", "ms a round"),
        (
            (f"{kind} {count} {unit}", f"{1000 * seconds:.2f}")
            for kind, unit in (("verify", "nodes"), ("draft", "passes"))
            for count, seconds in calibration["seconds"][kind].items()
        ),
    )
    typer.echo(f"next: {bench_command(model, f'falcon@{adapter}', placement)}")
