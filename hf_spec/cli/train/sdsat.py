"""`hf-spec train sdsat`: a thin command over `hf_spec.training.sdsat`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_spec.cli.next_step import bench_command
from hf_spec.cli.options import AUTO, Device, Dtype, ModelOption
from hf_spec.cli.train.common import (
    Accumulate,
    BatchTokens,
    Epochs,
    EvaluateEvery,
    LearningRate,
    ResponseFiles,
    Seed,
    TeacherFolder,
    answer_files,
    conclude,
)
from hf_spec.training.choices import LAYOUTS, LOSSES, MODES, START_SHARE

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_spec.training.teacher import Example


def train_sdsat_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    responses: ResponseFiles,
    out: Annotated[
        Path, typer.Option(help="Folder for adapter or model; an interrupted run resumes.")
    ],
    mode: Annotated[str, typer.Option(help=", ".join(MODES))] = "gated",
    window: Annotated[int, typer.Option(min=1, help="L, most adaptive tokens in a row.")] = 5,
    diverse: Annotated[
        bool, typer.Option("--diverse", help="One adaptive token per place, not one for all.")
    ] = False,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the LoRA.")] = 16,
    lora_layer: Annotated[
        list[str] | None,
        typer.Option(help="Such as q_proj; may be repeated. All linear layers by default."),
    ] = None,
    loss: Annotated[str, typer.Option(help=", ".join(LOSSES))] = "improved",
    layout: Annotated[
        str | None, typer.Option(help=f"{', '.join(LAYOUTS)}; chosen by mode and loss by default.")
    ] = None,
    start_share: Annotated[
        float, typer.Option(min=0, max=1, help="Of the positions, where windows start.")
    ] = START_SHARE,
    adaptive_weight: Annotated[
        float, typer.Option(min=0, help="Of the adaptive positions beside the clean text.")
    ] = 1.0,
    soft_weight: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the target's opinion in the loss.")
    ] = 0.0,
    infilling: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the code put into infilling format.")
    ] = 0.0,
    infilling_task: Annotated[str, typer.Option(help="Which answers are code.")] = "code",
    num_adaptive: Annotated[
        int | None, typer.Option(min=1, help="k in use; the window by default.")
    ] = None,
    token_id: Annotated[
        list[int] | None,
        typer.Option(min=0, help="Spare row of the vocabulary, for --mode full; may be repeated."),
    ] = None,
    epochs: Epochs = 3,
    learning_rate: LearningRate = 1e-3,
    batch_tokens: BatchTokens = 2048,
    accumulate: Accumulate = 1,
    teacher: TeacherFolder = None,
    evaluate_every: EvaluateEvery = 300,
    seed: Seed = 0,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Train adaptive tokens, after which the target drafts for itself.

    Modes gated and embeddings leave the target's output as it is; lora and full make another model
    of it, full in OUT itself. See hf_spec.models.adaptive_tokens. The target's opinions are
    computed, and kept, only for --soft-weight. Use the adapter with
    model.generate(..., spec_strategy="sdsat", assistant=OUT).

        hf-spec train sdsat --model MODEL --responses answers.jsonl --out my-tokens --window 5
    """
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.models.adaptive_tokens import CONFIG_ENTRY
    from hf_spec.training.sdsat import train_sdsat
    from hf_spec.training.sdsat_student import SdsatTrainSettings
    from hf_spec.training.trainer import TrainSettings

    run = TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        learning_rate=learning_rate,
        seed=seed,
        evaluate_every=evaluate_every,
    )
    settings = SdsatTrainSettings(
        mode=mode,
        window=window,
        diverse=diverse,
        rank=rank,
        targets=tuple(lora_layer or ()),
        loss=loss,
        layout=layout,
        start_share=start_share,
        adaptive_weight=adaptive_weight,
        soft_weight=soft_weight,
        infilling=infilling,
        infilling_task=infilling_task,
        num_adaptive=num_adaptive,
        token_ids=tuple(token_id or ()),
    )
    target = load_target(model, dtype, device)
    needed = settings.infilling or settings.mode == "full"
    tokenizer = load_tokenizer(model) if needed else None
    examples = _examples(target, responses, teacher, bool(settings.soft_weight))
    adapter = train_sdsat(target, examples, out, settings, run, tokenizer)
    options = getattr(target.config, CONFIG_ENTRY) if adapter is None else adapter.options
    step = bench_command(model, f"sdsat@{out}", dtype, device)
    if settings.mode == "full":
        step = bench_command(out, "sdsat", dtype, device)
    elif settings.mode == "lora":
        step = f"in Python, hf_spec.models.adaptive_tokens.merge_lora(model, {str(out)!r})"
    conclude(options["held_back"], step)


def _examples(
    target: PreTrainedModel, files: list[Path], folder: Path | None, with_opinions: bool
) -> list[Example]:
    """The answers of all files, each with a folder of opinions of its own if they are wanted."""
    from hf_spec.training.teacher import Example, teacher_examples
    from hf_spec.training.trainer import processes

    examples: list[Example] = []
    for answers, own in answer_files(files, folder, "teacher"):
        if not with_opinions:
            examples += map(Example.without_opinion, answers)
            continue
        with processes().main_process_first():
            examples += teacher_examples(target, answers, own)
    return examples
