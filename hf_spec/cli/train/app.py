"""`hf-spec train ...`: writing answers, and one command for every method that can be trained.

A method describes its training in its `settings.py` (`hf_spec.training.settings`); the module
that trains is imported when the command runs.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from hf_spec.cli import options
from hf_spec.cli.train import common
from hf_spec.methods.trainings import known_trainings
from hf_spec.training.settings import BATCH_SIZE, ResponseSettings, Training

train = typer.Typer(
    no_args_is_help=True, help="Train draft models, draft heads and adaptive tokens."
)


# Trainings that are suggested after the answers, by the stored features.
SUGGESTED = {"last": "falcon", "fused": "eagle"}


@train.command("responses", cls=common.DataCommand)
@options.from_settings
def train_responses_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelArgument,
    prompts: Annotated[Path, typer.Option(**options.FILE, help="JSON lines with id, task, turns.")],
    out: Annotated[Path, typer.Option(help="JSON lines; an interrupted run resumes here.")],
    settings: ResponseSettings,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = BATCH_SIZE,
    features: Annotated[
        Literal["last", "fused"] | None,
        typer.Option(help="Also store hidden states, of the last layer or several."),
    ] = None,
    placement: options.Placement,
) -> None:
    """Generate the target's answers, which are the training data of all other trainings.

    On a CPU, batches of about 128 prompts are the fastest, and --dtype bfloat16 is faster if the
    processor has bfloat16 instructions. Prompts that share thirteen consecutive words with those
    of hf-spec bench are skipped. --features last saves one pass of the target in train falcon,
    medusa, and mtp; --features fused saves it in train eagle, block, and falcon --fused.

        hf-spec train responses MODEL --prompts prompts.jsonl --out answers.jsonl
    """
    from tqdm import tqdm

    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts, without_benchmark_overlap
    from hf_spec.training.features import LAST, FeatureRecorder, features_of, fused_layers
    from hf_spec.training.job import data_folder
    from hf_spec.training.responses import generate_responses

    options.check_out(out, prompts)
    in_file = load_prompts(prompts)
    usable = without_benchmark_overlap(in_file)
    if len(usable) < len(in_file):
        typer.echo(
            f"{len(in_file) - len(usable)} of {len(in_file)} prompts share text with those that "
            "hf-spec bench reports on, and are left out"
        )
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    with tqdm(total=len(usable), desc="prompts", disable=None) as bar:
        recorder = None
        if features is not None:
            layers = fused_layers(target) if features == "fused" else LAST
            recorder = FeatureRecorder(target, data_folder(out, features_of(layers)), layers)

        def progress(done: int, _: int) -> None:
            bar.update(done)

        left_out = generate_responses(
            target, tokenizer, usable, out, settings, batch_size, progress, recorder
        )
    typer.echo(f"{out} is complete; {left_out} prompts were too long")
    words = (model, "--responses", out, "--out", out.with_name(f"{out.stem}-head"))
    method = SUGGESTED[features or "last"]
    typer.echo(f"next: {common.next_command('train', method, *words, placement=placement)}")


def add_command(training: Training) -> None:
    """Add `hf-spec train NAME` for the training of a method."""

    def command(
        *,
        model: str,
        responses: Any,
        out: Path,
        settings: Any,
        placement: options.Placement,
        **groups: Any,
    ) -> None:
        from hf_spec.cli.loading import load_target, load_tokenizer
        from hf_spec.training.job import TrainingJob, TrainingResult

        job = TrainingJob(
            files=responses if training.several_files else [responses],
            out=out,
            settings=settings,
            load_target=lambda: load_target(model, placement),
            load_tokenizer=lambda: load_tokenizer(model),
            several_files=training.several_files,
            notify=typer.echo,
            **groups,
        )
        function: Callable[[TrainingJob], TrainingResult] = pkgutil.resolve_name(training.function)
        result = function(job)
        bench = (model, f"{training.strategy}@{out}")
        if result.whole_model:
            bench = (str(out), training.strategy)
        common.conclude(result, result.next_step or common.bench_command(*bench, placement))

    folder = typer.Option(help=f"Folder for {training.result}; resumes if interrupted.")
    annotations = {
        "model": options.ModelArgument,
        "responses": common.ResponseFiles if training.several_files else common.Responses,
        "out": Annotated[Path, folder],
        "settings": training.settings,
        "run": None if training.run is None else type(training.run),
        "data": training.data_options,
        "options": training.options,
        "placement": options.Placement,
    }
    # The options of the command are the parameters of its function.
    parameters = {
        name: Parameter(name, Parameter.KEYWORD_ONLY, annotation=kind)
        for name, kind in annotations.items()
        if kind is not None
    }
    if training.run is not None:
        parameters["run"] = parameters["run"].replace(default=training.run)
    command.__dict__["__signature__"] = inspect.Signature(list(parameters.values()))
    command.__doc__ = training.help
    train.command(training.name, cls=common.DataCommand)(options.from_settings(command))


for _training in known_trainings():
    add_command(_training)
