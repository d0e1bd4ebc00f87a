"""`hf-spec train ...` and `hf-spec calibrate ...`: thin commands over this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.bench.prompts import load_prompts
from hf_spec.errors import SpecError
from hf_spec.models.disco_classifier import METHOD
from hf_spec.training.calibrate import CalibrationSettings, calibrate_disco, validation_prompts
from hf_spec.training.disco import DiscoTrainSettings, train_disco
from hf_spec.training.draft import DraftTrainSettings, train_draft
from hf_spec.training.responses import ResponseSettings, generate_responses, read_responses
from hf_spec.training.teacher import teacher_examples
from hf_spec.training.trainer import TrainSettings

train = typer.Typer(no_args_is_help=True, help="Train the parts that strategies need.")
calibrate = typer.Typer(no_args_is_help=True, help="Choose options by measured speed.")

Model = Annotated[str, typer.Option(help="The target model: folder or Hub id.")]
Responses = Annotated[
    Path, typer.Option(exists=True, help="The target's answers, from `hf-spec train responses`.")
]
Dtype = Annotated[str, typer.Option(help="Of the target: float32, bfloat16 or float16.")]


class Labels(str, Enum):
    """What the classifier learns; see `hf_spec.training.disco`."""

    hard = "hard"
    soft = "soft"


@train.command("responses")
def train_responses_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
    prompts: Annotated[Path, typer.Option(exists=True, help="JSON lines with id, task, turns.")],
    out: Annotated[Path, typer.Option(help="JSON lines; an interrupted run goes on here.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 160,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 128,
    dtype: Dtype = "bfloat16",
) -> None:
    """Write the target's own answers, from which every other training learns.

    On a CPU batches of about 128 give the most tokens per second, and bfloat16 is much faster than
    float32 where the processor computes in it.
    """
    settings = ResponseSettings(max_new_tokens, max_prompt_tokens, temperature, seed)
    with _in_one_sentence():
        known = load_prompts(prompts)
        target, tokenizer = _load(model, dtype), AutoTokenizer.from_pretrained(model)
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
    Console().print(f"{out} is complete; {left_out} prompts were too long")


@train.command("draft")
def train_draft_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
    responses: Responses,
    out: Annotated[Path, typer.Option(help="Folder for the adapter; an interrupted run resumes.")],
    teacher: Annotated[
        Path | None, typer.Option(help="Folder for the target's opinions; beside the answers.")
    ] = None,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the draft model.")] = 4,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA.")] = 64,
    vocabulary: Annotated[
        int, typer.Option(min=0, help="Most frequent tokens it can propose; 0 for all.")
    ] = 8192,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    learning_rate: Annotated[float, typer.Option(min=0)] = 2e-3,
    batch_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 2048,
    seed: Annotated[int, typer.Option(help="Of the order and of the first weights.")] = 0,
    dtype: Dtype = "bfloat16",
) -> None:
    """Train a draft model out of the target's own first layers.

    Use it with model.generate(..., spec_strategy="draft", assistant=OUT), or "tree", or "gsd".
    """
    settings = DraftTrainSettings(layers, rank, vocabulary or None)
    run = TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        seed=seed,
    )
    with _in_one_sentence():
        answers = list(read_responses(responses))
        folder = teacher or responses.with_suffix(".teacher")
        target = _load(model, dtype)
        examples = teacher_examples(target, answers, folder)
        adapter = train_draft(target, examples, out, settings, run)
    Console().print(adapter.options["held_back"])


@train.command("disco")
def train_disco_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
    responses: Responses,
    out: Annotated[Path, typer.Option(help="Folder for the adapter; an interrupted run resumes.")],
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
    dtype: Dtype = "float32",
) -> None:
    """Train the classifier that tells a draft model when to stop.

    It learns from the target's own answers whether each token of the draft model would have been
    accepted. Then choose its threshold with `hf-spec calibrate disco`, and use it:
    model.generate(..., spec_strategy="disco", assistant=OUT).
    """
    if (draft is None) == (draft_layers is None):
        raise typer.BadParameter("give either --draft or --draft-layers")
    named: Any = draft if draft is not None else {"truncated": draft_layers}
    with _in_one_sentence():
        answers = list(read_responses(responses))
        settings = DiscoTrainSettings(labels=labels.value, seed=seed)
        adapter = train_disco(_load(model, dtype), named, answers, out, settings, task)
    _show_rules(adapter)


@calibrate.command("disco")
def calibrate_disco_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
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
    dtype: Dtype = "float32",
) -> None:
    """Choose DISCO's threshold and longest draft by speed on this machine.

    Tries every pair, in turn with static lengths, on prompts that the classifier was not trained
    on, and writes the fastest pair and the table into the adapter. Leave the machine alone
    meanwhile.
    """
    base = CalibrationSettings()
    with _in_one_sentence():
        settings = CalibrationSettings(
            thresholds=tuple(threshold or base.thresholds),
            longest=tuple(longest or base.longest),
            new_tokens=new_tokens,
            repeats=repeats,
        )
        known = load_prompts(prompts)
        chosen = known if use_all else validation_prompts(load_adapter(adapter, METHOD), known)
        chosen = chosen[:max_prompts]
        target, tokenizer = _load(model, dtype), AutoTokenizer.from_pretrained(model)
        total = settings.num_ways * len(chosen) * settings.repeats
        with tqdm(total=total, desc="runs", disable=None) as bar:
            made = calibrate_disco(
                target, tokenizer, adapter, chosen, settings, progress=bar.update
            )
    _show_ways(made)


def _load(name: str, dtype: str) -> PreTrainedModel:
    if dtype not in {"float32", "bfloat16", "float16"}:
        raise typer.BadParameter(f"--dtype {dtype}: choose float32, bfloat16 or float16")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = AutoModelForCausalLM.from_pretrained(
        name, dtype=getattr(torch, dtype), use_safetensors=True
    )
    return model.to(device).eval()


@contextmanager
def _in_one_sentence() -> Iterator[None]:
    """Say what is wrong without a traceback."""
    try:
        yield
    except SpecError as error:
        raise typer.BadParameter(str(error)) from error


def _show_rules(adapter: SpecAdapter) -> None:
    """What the classifier and the fixed rules foretell on prompts that were held back."""
    validation = adapter.options["validation"]
    table = Table(title=f"{validation['acceptance']:.0%} of the positions held back are accepted")
    for column in ("rule", "class", "precision", "recall", "F1"):
        table.add_column(column)
    for rule, classes in validation["rules"].items():
        for name, figures in classes.items():
            cells = [f"{figures[key]:.2f}" for key in ("precision", "recall", "f1")]
            table.add_row(rule, name, *cells)
    Console().print(table)


def _show_ways(adapter: SpecAdapter) -> None:
    """Speeds, and what was chosen."""
    calibration = adapter.options["calibration"]
    table = Table(title=f"speed relative to drafts of {calibration['reference']} tokens")
    for column in ("", "median", "p20 - p80", "tau"):
        table.add_column(column)
    for name, row in calibration["table"].items():
        spread = f"{row['ratio_p20']:.2f} - {row['ratio_p80']:.2f}"
        chosen = " <" if name in {calibration["best"], calibration["best_static"]} else ""
        table.add_row(name + chosen, f"{row['ratio']:.2f}", spread, f"{row['tau']:.2f}")
    Console().print(table)
