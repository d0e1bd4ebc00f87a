"""`hf-spec train ...`: thin commands over this package; each imports it once it runs."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hf_spec.cli.next_step import bench_command, next_command
from hf_spec.cli.options import AUTO, Device, Dtype, ModelOption, check_out
from hf_spec.cli.train.common import (
    AdapterOut,
    Epochs,
    LearningRate,
    RecordedCommand,
    Responses,
    TeacherFolder,
    Vocabulary,
    conclude,
)
from hf_spec.cli.train.falcon import train_falcon_command
from hf_spec.cli.train.sdsat import train_sdsat_command

if TYPE_CHECKING:
    from hf_spec.adapters.folder import SpecAdapter

train = typer.Typer(no_args_is_help=True, help="Train the parts that strategies need.")


class Labels(str, Enum):
    """What the classifier learns; see `hf_spec.training.disco`."""

    hard = "hard"
    soft = "soft"


@train.command("responses")
def train_responses_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    prompts: Annotated[Path, typer.Option(exists=True, help="JSON lines with id, task, turns.")],
    out: Annotated[Path, typer.Option(help="JSON lines; an interrupted run goes on here.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 160,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 128,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Write the target's own answers, from which every other training learns.

    On a CPU batches of about 128 give the most tokens per second, and --dtype bfloat16 is
    faster than float32 where the processor computes in it. An interrupted run goes on where it was.

        hf-spec train responses --model MODEL --prompts prompts.jsonl --out answers.jsonl
    """
    from tqdm import tqdm

    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.data.prompts import load_prompts
    from hf_spec.training.responses import ResponseSettings, generate_responses

    check_out(out)
    settings = ResponseSettings(max_new_tokens, max_prompt_tokens, temperature, seed)
    known = load_prompts(prompts)
    target, tokenizer = load_target(model, dtype, device), load_tokenizer(model)
    with tqdm(total=len(known), desc="prompts", disable=None) as bar:
        left_out = generate_responses(
            target,
            tokenizer,
            known,
            out,
            settings,
            batch_size,
            lambda done, tokens: bar.update(done) and None,
        )
    typer.echo(f"{out} is complete; {left_out} prompts were too long")
    head = out.with_name(f"{out.stem}-head")
    where = ("--model", model, "--responses", out, "--out", head)
    typer.echo(f"next: {next_command('train', 'falcon', *where, dtype=dtype, device=device)}")


@train.command("draft", cls=RecordedCommand)
def train_draft_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    responses: Responses,
    out: AdapterOut,
    teacher: TeacherFolder = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft model.")] = 4,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA.")] = 64,
    vocabulary: Vocabulary = 8192,
    epochs: Epochs = 3,
    learning_rate: LearningRate = 2e-3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the order and of the first weights.")] = 0,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Train a draft model out of the target's own first layers.

    What the target thinks of the answers is computed first, once, and kept beside them. Use the
    model with model.generate(..., spec_strategy="draft", assistant=OUT), or "tree", or "gsd".

        hf-spec train draft --model MODEL --responses answers.jsonl --out my-draft --layers 2
    """
    from hf_spec.cli.loading import load_target
    from hf_spec.training.draft import DraftTrainSettings, train_draft
    from hf_spec.training.responses import read_responses
    from hf_spec.training.teacher import teacher_examples
    from hf_spec.training.trainer import TrainSettings

    settings = DraftTrainSettings(layers, rank, vocabulary or None)
    run = TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        seed=seed,
    )
    answers = list(read_responses(responses))
    folder = teacher or responses.with_suffix(".teacher")
    target = load_target(model, dtype, device)
    examples = teacher_examples(target, answers, folder)
    adapter = train_draft(target, examples, out, settings, run)
    conclude(adapter.options["held_back"], bench_command(model, f"tree@{out}", dtype, device))


train.command("falcon", cls=RecordedCommand)(train_falcon_command)
train.command("sdsat", cls=RecordedCommand)(train_sdsat_command)


@train.command("disco", cls=RecordedCommand)
def train_disco_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    responses: Responses,
    out: AdapterOut,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: folder or Hub id; or use --draft-layers.")
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(min=1, help="Draft with the target's own first layers.")
    ] = None,
    labels: Annotated[
        Labels, typer.Option(help="hard: the tokens agree. soft: probability of acceptance.")
    ] = Labels.hard,
    task: Annotated[
        list[str] | None, typer.Option(help="Learn from this task alone; may be repeated.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the split and of the training.")] = 0,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Train the classifier that tells a draft model when to stop.

    It learns from the target's own answers whether each token of the draft model would have been
    accepted. Then choose its threshold with `hf-spec calibrate disco`, and use it:
    model.generate(..., spec_strategy="disco", assistant=OUT).

        hf-spec train disco --model MODEL --responses answers.jsonl --draft DRAFT --out my-disco
    """
    from hf_spec.cli.loading import load_target
    from hf_spec.training.disco import DiscoTrainSettings, train_disco
    from hf_spec.training.responses import read_responses
    from hf_spec.training.trainer import processes

    if (draft is None) == (draft_layers is None):
        raise typer.BadParameter("give either --draft or --draft-layers")
    named: Any = draft if draft is not None else {"truncated": draft_layers}
    answers = list(read_responses(responses))
    settings = DiscoTrainSettings(labels=labels.value, seed=seed)
    target = load_target(model, dtype, device)
    adapter = train_disco(target, named, answers, out, settings, task)
    if processes().is_main_process:
        _show_rules(adapter)
        typer.echo(f"next: {bench_command(model, f'disco@{out}', dtype, device)}")


def _show_rules(adapter: SpecAdapter) -> None:
    """What the classifier and the fixed rules predict on prompts that were held back."""
    from rich.console import Console
    from rich.table import Table

    validation = adapter.options["validation"]
    table = Table(title=f"{validation['acceptance']:.0%} of the positions held back are accepted")
    for column in ("rule", "class", "precision", "recall", "F1"):
        table.add_column(column)
    for rule, classes in validation["rules"].items():
        for name, figures in classes.items():
            cells = [f"{figures[key]:.2f}" for key in ("precision", "recall", "f1")]
            table.add_row(rule, name, *cells)
    Console().print(table)
