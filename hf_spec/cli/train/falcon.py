"""`hf-spec train falcon`: a thin command over `hf_spec.training.falcon`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_spec.cli.next_step import bench_command
from hf_spec.cli.options import AUTO, Device, Dtype, ModelOption
from hf_spec.cli.train.common import (
    Accumulate,
    AdapterOut,
    BatchTokens,
    Epochs,
    EvaluateEvery,
    LearningRate,
    ResponseFiles,
    Seed,
    Vocabulary,
    answer_files,
    conclude,
)
from hf_spec.training.choices import CSGD

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hf_spec.training.features import Text


def _choices(name: str) -> str:
    return f"{', '.join(CSGD[name])}; see hf_spec.training.csgd."


def train_falcon_command(  # noqa: PLR0913 - one parameter an option
    model: ModelOption,
    responses: ResponseFiles,
    out: AdapterOut,
    block_size: Annotated[int, typer.Option(min=1, max=4, help="k, tokens drafted at once.")] = 2,
    layers: Annotated[int, typer.Option(min=1, help="Attention layers of the head.")] = 1,
    recurrent: Annotated[
        bool, typer.Option("--recurrent", help="Carry the LSTM's state along the text.")
    ] = False,
    vocabulary: Vocabulary = 8192,
    epochs: Epochs = 8,
    learning_rate: LearningRate = 2e-3,
    batch_tokens: BatchTokens = 2048,
    accumulate: Accumulate = 1,
    csgd: Annotated[str, typer.Option(help=_choices("schedule"))] = "paper",
    noise: Annotated[str, typer.Option(help=_choices("noise"))] = "paper",
    hard_label: Annotated[str, typer.Option(help=_choices("hard_label"))] = "token",
    replaced_token: Annotated[str, typer.Option(help=_choices("replaced_token"))] = "teacher",
    feature_weight: Annotated[float, typer.Option(min=0, help="Of the feature loss.")] = 1.0,
    soft_weight: Annotated[float, typer.Option(min=0, help="Of the target's opinion.")] = 0.09,
    hard_weight: Annotated[float, typer.Option(min=0, help="Of the one right token.")] = 0.01,
    soft_temperature: Annotated[float, typer.Option(help="Released code: 0.95.")] = 1.0,
    own_features: Annotated[
        float, typer.Option(min=0, max=1, help="Share of blocks fed with predicted features.")
    ] = 0.0,
    feature_scale: Annotated[str, typer.Option(help=_choices("feature_scale"))] = "raw",
    max_context: Annotated[
        int, typer.Option(min=0, help="Last tokens of a prompt that are read; 0 for all.")
    ] = 64,
    features: Annotated[
        Path | None, typer.Option(help="Folder for the target's features; beside the answers.")
    ] = None,
    store: Annotated[
        bool, typer.Option(help="Keep the features on disk, or compute them in every step.")
    ] = True,
    init: Annotated[Path | None, typer.Option(help="A Falcon adapter to go on from.")] = None,
    evaluate_every: EvaluateEvery = 300,
    seed: Seed = 0,
    dtype: Dtype = AUTO,
    device: Device = None,
) -> None:
    """Train a Falcon head, which drafts several tokens in one pass.

    The target's features of all texts are computed first, once, and kept beside the answers. Loss
    weights and CSGD's options are the paper's by default; on a small model --soft-weight 1
    --hard-weight 0.1 teach it faster. Use the head with
    model.generate(..., spec_strategy="falcon", assistant=OUT).

        hf-spec train falcon --model MODEL --responses answers.jsonl --out my-head
        hf-spec train falcon --config falcon.yaml --seed 1
    """
    from hf_spec.adapters.folder import load_adapter
    from hf_spec.cli.loading import load_target
    from hf_spec.models.falcon_head import METHOD, FalconShape
    from hf_spec.training.csgd import CsgdSettings
    from hf_spec.training.falcon import FalconTrainSettings, train_falcon
    from hf_spec.training.trainer import TrainSettings

    run = TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        accumulate=accumulate,
        learning_rate=learning_rate,
        seed=seed,
        evaluate_every=evaluate_every,
    )
    settings = FalconTrainSettings(
        FalconShape(block_size, layers, recurrent),
        CsgdSettings(
            schedule=csgd,
            noise=noise,
            hard_label=hard_label,
            replaced_token=replaced_token,
            feature_weight=feature_weight,
            soft_weight=soft_weight,
            hard_weight=hard_weight,
            soft_temperature=soft_temperature,
            own_features=own_features,
            feature_scale=feature_scale,
        ),
        vocabulary or None,
        max_context or None,
    )
    target = load_target(model, dtype, device)
    texts = _texts(target, responses, features, store)
    start = None if init is None else load_adapter(init, METHOD)
    adapter = train_falcon(target, texts, out, settings, run, start)
    conclude(adapter.options["held_back"], bench_command(model, f"falcon@{out}", dtype, device))


def _texts(
    target: PreTrainedModel, files: list[Path], folder: Path | None, store: bool
) -> list[Text]:
    """The texts of all files, each with a folder of features of its own."""
    from hf_spec.training.features import Text, disk_need, in_words, stored_texts
    from hf_spec.training.trainer import processes

    texts: list[Text] = []
    for answers, own in answer_files(files, folder, "features"):
        if not store:
            texts += map(Text, answers)
            continue
        need = in_words(disk_need(target, answers))
        typer.echo(f"the features of {len(answers)} texts take {need} in {own}")
        with processes().main_process_first():
            texts += stored_texts(target, answers, own)
    return texts
