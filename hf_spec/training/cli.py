"""`hf-spec train ...`: thin commands over this package."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoTokenizer, PreTrainedModel
from typer.core import TyperCommand

from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.bench.prompts import load_prompts
from hf_spec.models.adaptive_tokens import CONFIG_ENTRY, MODES
from hf_spec.models.falcon_head import METHOD as FALCON
from hf_spec.models.falcon_head import FalconShape
from hf_spec.training.cli_common import (
    Accumulate,
    AdapterOut,
    BatchTokens,
    Dtype,
    Epochs,
    EvaluateEvery,
    LearningRate,
    Model,
    ResponseFiles,
    Responses,
    Seed,
    TeacherFolder,
    Vocabulary,
    answer_files,
    load_target,
)
from hf_spec.training.csgd import CHOICES, CsgdSettings
from hf_spec.training.disco import DiscoTrainSettings, train_disco
from hf_spec.training.draft import DraftTrainSettings, train_draft
from hf_spec.training.falcon import FalconTrainSettings, train_falcon
from hf_spec.training.features import Text, disk_need, in_words, stored_texts
from hf_spec.training.responses import ResponseSettings, generate_responses, read_responses
from hf_spec.training.run_record import with_options
from hf_spec.training.sdsat import train_sdsat
from hf_spec.training.sdsat_student import LAYOUTS, LOSSES, SdsatTrainSettings
from hf_spec.training.teacher import Example, teacher_examples
from hf_spec.training.trainer import TrainSettings, processes
from hf_spec.training.windows import START_SHARE

train = typer.Typer(no_args_is_help=True, help="Train the parts that strategies need.")


class RecordedCommand(TyperCommand):
    """A command whose options stand in the run record of the training that it starts."""

    def invoke(self, ctx: Any) -> Any:
        """Run it."""
        with with_options(ctx.params):
            return super().invoke(ctx)


def _choices(name: str) -> str:
    return f"{', '.join(CHOICES[name])}; see hf_spec.training.csgd."


class Labels(str, Enum):
    """What the classifier learns; see `hf_spec.training.disco`."""

    hard = "hard"
    soft = "soft"


@train.command("responses")
def train_responses_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
    prompts: Annotated[Path, typer.Option(exists=True, help="JSON lines with id, task, turns.")],
    out: Annotated[Path, typer.Option(help="JSON lines; an interrupted run goes on here.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 160,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longest prompt, in tokens.")] = 512,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Of sampled answers.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = 128,
    dtype: Dtype = "bfloat16",
) -> None:
    """Write the target's own answers, from which every other training learns.

    On a CPU batches of about 128 give the most tokens per second, and bfloat16 is much faster than
    float32 where the processor computes in it. An interrupted run goes on where it was.

        hf-spec train responses --model MODEL --prompts prompts.jsonl --out answers.jsonl
    """
    settings = ResponseSettings(max_new_tokens, max_prompt_tokens, temperature, seed)
    known = load_prompts(prompts)
    target, tokenizer = load_target(model, dtype), AutoTokenizer.from_pretrained(model)
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


@train.command("draft", cls=RecordedCommand)
def train_draft_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
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
    dtype: Dtype = "bfloat16",
) -> None:
    """Train a draft model out of the target's own first layers.

    What the target thinks of the answers is computed first, once, and kept beside them. Use the
    model with model.generate(..., spec_strategy="draft", assistant=OUT), or "tree", or "gsd".

        hf-spec train draft --model MODEL --responses answers.jsonl --out my-draft --layers 2
    """
    settings = DraftTrainSettings(layers, rank, vocabulary or None)
    run = TrainSettings(
        epochs=epochs,
        batch_tokens=batch_tokens,
        learning_rate=learning_rate,
        seed=seed,
    )
    answers = list(read_responses(responses))
    folder = teacher or responses.with_suffix(".teacher")
    target = load_target(model, dtype)
    examples = teacher_examples(target, answers, folder)
    adapter = train_draft(target, examples, out, settings, run)
    Console().print(adapter.options["held_back"])


@train.command("falcon", cls=RecordedCommand)
def train_falcon_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
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
        float, typer.Option(min=0, max=1, help="Share of blocks fed with foretold features.")
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
    dtype: Dtype = "bfloat16",
) -> None:
    """Train a Falcon head, which drafts several tokens in one pass.

    The target's features of all texts are computed first, once, and kept beside the answers. Loss
    weights and CSGD's options are the paper's by default; on a small model --soft-weight 1
    --hard-weight 0.1 teach it faster. Use the head with
    model.generate(..., spec_strategy="falcon", assistant=OUT).

        hf-spec train falcon --model MODEL --responses answers.jsonl --out my-head
        hf-spec train falcon --config falcon.yaml --seed 1
    """
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
            csgd,
            noise,
            hard_label,
            replaced_token,
            feature_weight,
            soft_weight,
            hard_weight,
            soft_temperature,
            own_features,
            feature_scale,
        ),
        vocabulary or None,
        max_context or None,
    )
    target = load_target(model, dtype)
    texts = _texts(target, responses, features, store)
    start = None if init is None else load_adapter(init, FALCON)
    adapter = train_falcon(target, texts, out, settings, run, start)
    Console().print(adapter.options["held_back"])


def _texts(
    target: PreTrainedModel, files: list[Path], folder: Path | None, store: bool
) -> list[Text]:
    """The texts of all files, each with a folder of features of its own."""
    texts: list[Text] = []
    for answers, own in answer_files(files, folder, "features"):
        if not store:
            texts += map(Text, answers)
            continue
        need = in_words(disk_need(target, answers))
        Console().print(f"the features of {len(answers)} texts take {need} in {own}")
        with processes().main_process_first():
            texts += stored_texts(target, answers, own)
    return texts


@train.command("sdsat", cls=RecordedCommand)
def train_sdsat_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
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
    dtype: Dtype = "bfloat16",
) -> None:
    """Train adaptive tokens, behind which the target drafts for itself.

    Modes gated and embeddings leave the target's output as it is; lora and full make another model
    of it, full in OUT itself. See hf_spec.models.adaptive_tokens. The target's opinions are
    computed, and kept, only for --soft-weight. Use the adapter with
    model.generate(..., spec_strategy="sdsat", assistant=OUT).

        hf-spec train sdsat --model MODEL --responses answers.jsonl --out my-tokens --window 5
    """
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
    target = load_target(model, dtype)
    needed = settings.infilling or settings.mode == "full"
    tokenizer = AutoTokenizer.from_pretrained(model) if needed else None
    examples = _examples(target, responses, teacher, bool(settings.soft_weight))
    adapter = train_sdsat(target, examples, out, settings, run, tokenizer)
    options = getattr(target.config, CONFIG_ENTRY) if adapter is None else adapter.options
    Console().print(options["held_back"])


def _examples(
    target: PreTrainedModel, files: list[Path], folder: Path | None, with_opinions: bool
) -> list[Example]:
    """The answers of all files, each with a folder of opinions of its own if they are wanted."""
    examples: list[Example] = []
    for answers, own in answer_files(files, folder, "teacher"):
        if not with_opinions:
            examples += map(Example.without_opinion, answers)
            continue
        with processes().main_process_first():
            examples += teacher_examples(target, answers, own)
    return examples


@train.command("disco", cls=RecordedCommand)
def train_disco_command(  # noqa: PLR0913 - one parameter an option
    model: Model,
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
    dtype: Dtype = "float32",
) -> None:
    """Train the classifier that tells a draft model when to stop.

    It learns from the target's own answers whether each token of the draft model would have been
    accepted. Then choose its threshold with `hf-spec calibrate disco`, and use it:
    model.generate(..., spec_strategy="disco", assistant=OUT).

        hf-spec train disco --model MODEL --responses answers.jsonl --draft DRAFT --out my-disco
    """
    if (draft is None) == (draft_layers is None):
        raise typer.BadParameter("give either --draft or --draft-layers")
    named: Any = draft if draft is not None else {"truncated": draft_layers}
    answers = list(read_responses(responses))
    settings = DiscoTrainSettings(labels=labels.value, seed=seed)
    adapter = train_disco(load_target(model, dtype), named, answers, out, settings, task)
    _show_rules(adapter)


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
