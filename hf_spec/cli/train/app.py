"""`hf-spec train ...`: thin commands over `hf_spec.training`; each imports it once it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from hf_spec.cli import options
from hf_spec.cli.train import common
from hf_spec.methods.disco.settings import DiscoTrainSettings
from hf_spec.methods.draft_model.settings import DRAFT_RUN, DraftTrainSettings
from hf_spec.methods.eagle.settings import EAGLE_RUN, EagleTrainSettings
from hf_spec.methods.falcon.settings import FALCON_RUN, FalconTrainSettings
from hf_spec.methods.sdsat.settings import SDSAT_RUN, SdsatTrainSettings
from hf_spec.training.settings import BATCH_SIZE, ResponseSettings, TrainSettings

if TYPE_CHECKING:
    from hf_spec.training.responses import Response

train = typer.Typer(no_args_is_help=True, help="Train the parts that strategies need.")


@train.command("responses")
@options.from_settings
def train_responses_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    prompts: Annotated[
        Path, typer.Option(exists=True, dir_okay=False, help="JSON lines with id, task, turns.")
    ],
    out: Annotated[Path, typer.Option(help="JSON lines; an interrupted run goes on here.")],
    settings: ResponseSettings,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch.")] = BATCH_SIZE,
    features: Annotated[
        Literal["last", "fused"] | None,
        typer.Option(help="Keep states of the target beside the answers: its last ones, or more."),
    ] = None,
    placement: options.Placement,
) -> None:
    """Write the target's own answers, from which every other training learns.

    On a CPU batches of about 128 give the most tokens per second, and --dtype bfloat16 is
    faster than float32 where the processor computes in it. An interrupted run goes on where it was.
    Prompts that share thirteen words in a row with those of hf-spec bench are left out.
    With --features last a later train falcon, with fused train falcon --fused or train eagle, is
    spared a pass of the target over all texts.

        hf-spec train responses --model MODEL --prompts prompts.jsonl --out answers.jsonl
    """
    from tqdm import tqdm

    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.common.prompts import load_prompts, without_benchmark_overlap
    from hf_spec.training.features import LAST, features_of, fused_layers
    from hf_spec.training.recorded import FeatureRecorder
    from hf_spec.training.responses import generate_responses

    options.check_out(out, prompts)
    given = load_prompts(prompts)
    known = without_benchmark_overlap(given)
    if len(known) < len(given):
        typer.echo(
            f"{len(given) - len(known)} of {len(given)} prompts share text with those that "
            "hf-spec bench reports on, and are left out"
        )
    target, tokenizer = load_target(model, placement), load_tokenizer(model)
    with tqdm(total=len(known), desc="prompts", disable=None) as bar:

        def progress(done: int, _: int) -> None:
            bar.update(done)

        recorder = None
        if features is not None:
            layers = fused_layers(target) if features == "fused" else LAST
            recorder = FeatureRecorder(target, common.beside(out, features_of(layers)), layers)
        left_out = generate_responses(
            target, tokenizer, known, out, settings, batch_size, progress, recorder
        )
    typer.echo(f"{out} is complete; {left_out} prompts were too long")
    where = ("--model", model, "--responses", out, "--out", out.with_name(f"{out.stem}-head"))
    kind = "eagle" if features == "fused" else "falcon"
    typer.echo(f"next: {common.next_command('train', kind, *where, placement=placement)}")


@train.command("draft", cls=common.RecordedCommand)
@options.from_settings
def train_draft_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    responses: common.Responses,
    out: common.AdapterOut,
    teacher: common.TeacherFolder = None,
    settings: DraftTrainSettings,
    run: TrainSettings = DRAFT_RUN,
    placement: options.Placement,
) -> None:
    """Train a draft model out of the target's own first layers.

    What the target thinks of the answers is computed first, once, and kept beside them. Use the
    model with model.generate(..., spec_strategy="draft", assistant=OUT), or "tree", or "gsd".

        hf-spec train draft --model MODEL --responses answers.jsonl --out my-draft --layers 2
    """
    from hf_spec.cli.loading import load_target
    from hf_spec.methods.draft_model.training import train_draft
    from hf_spec.training.answers import teacher_examples
    from hf_spec.training.responses import read_responses

    answers = list(read_responses(responses))
    target = load_target(model, placement)
    examples = teacher_examples(target, answers, teacher or responses.with_suffix(".teacher"))
    adapter = train_draft(target, examples, out, settings, run)
    common.conclude(
        adapter.options["held_back"], common.bench_command(model, f"tree@{out}", placement)
    )


@train.command("falcon", cls=common.RecordedCommand)
@options.from_settings
def train_falcon_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    responses: common.ResponseFiles,
    out: common.AdapterOut,
    settings: FalconTrainSettings,
    run: TrainSettings = FALCON_RUN,
    features: common.FeaturesFolder = None,
    store: common.StoreFeatures = True,
    init: common.InitHead = None,
    placement: options.Placement,
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
    from hf_spec.methods.falcon.head import METHOD
    from hf_spec.methods.falcon.training import train_falcon
    from hf_spec.training.features import LAST, fused_layers

    target = load_target(model, placement)
    layers = fused_layers(target) if settings.shape.fused else LAST
    known = common.known_texts(target, responses, layers, features, store)
    start = None if init is None else load_adapter(init, METHOD)
    adapter = train_falcon(target, known, out, settings, run, start)
    common.conclude(
        adapter.options["held_back"], common.bench_command(model, f"falcon@{out}", placement)
    )


@train.command("eagle", cls=common.RecordedCommand)
@options.from_settings
def train_eagle_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    responses: common.ResponseFiles,
    out: Annotated[Path, typer.Option(help="Folder for the head; an interrupted run resumes.")],
    settings: EagleTrainSettings,
    run: TrainSettings = EAGLE_RUN,
    features: common.FeaturesFolder = None,
    store: common.StoreFeatures = True,
    init: common.InitHead = None,
    placement: options.Placement,
) -> None:
    """Train an EAGLE-3 head, in the layout of vLLM's speculators.

    States of four layers of the target are computed first for all texts, once, and kept beside the
    answers. Use the head with model.generate(..., spec_strategy="eagle", assistant=OUT).

        hf-spec train eagle --model MODEL --responses answers.jsonl --out my-head --steps 4
        hf-spec train eagle --model MODEL --responses more.jsonl --out my-next-head --init my-head
    """
    from hf_spec.adapters.published import known_head
    from hf_spec.cli.loading import load_target
    from hf_spec.methods.eagle.training import check_start, train_eagle
    from hf_spec.training.features import fused_layers

    start = None if init is None else known_head(init)
    target = load_target(model, placement)
    if start is not None:
        # Before the features, which take a while.
        check_start(start, target, settings)
    known = common.known_texts(target, responses, fused_layers(target), features, store)
    figures = train_eagle(target, known, out, settings, run, start)
    common.conclude(figures, common.bench_command(model, f"eagle@{out}", placement))


@train.command("sdsat", cls=common.RecordedCommand)
@options.from_settings
def train_sdsat_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    responses: common.ResponseFiles,
    out: Annotated[
        Path, typer.Option(help="Folder for adapter or model; an interrupted run resumes.")
    ],
    settings: SdsatTrainSettings,
    run: TrainSettings = SDSAT_RUN,
    teacher: common.TeacherFolder = None,
    placement: options.Placement,
) -> None:
    """Train adaptive tokens, after which the target drafts for itself.

    Modes gated and embeddings leave the target's output as it is; lora and full make another model
    of it, full in OUT itself. See hf_spec.methods.sdsat.adaptive_tokens. The target's opinions are
    computed, and kept, only for --soft-weight. Use the adapter with
    model.generate(..., spec_strategy="sdsat", assistant=OUT).

        hf-spec train sdsat --model MODEL --responses answers.jsonl --out my-tokens --window 5
    """
    from hf_spec.cli.loading import load_target, load_tokenizer
    from hf_spec.methods.sdsat.adaptive_tokens import CONFIG_ENTRY
    from hf_spec.methods.sdsat.training import train_sdsat
    from hf_spec.training.answers import Example, teacher_examples

    def examples(answers: list[Response], own: Path) -> list[Example]:
        if settings.soft_weight:
            return teacher_examples(target, answers, own)
        return [Example.without_opinion(answer) for answer in answers]

    target = load_target(model, placement)
    needed = settings.infilling or settings.mode == "full"
    tokenizer = load_tokenizer(model) if needed else None
    known = common.known_answers(responses, teacher, "teacher", examples)
    adapter = train_sdsat(target, known, out, settings, run, tokenizer)
    made = getattr(target.config, CONFIG_ENTRY) if adapter is None else adapter.options
    step = common.bench_command(model, f"sdsat@{out}", placement)
    if settings.mode == "full":
        step = common.bench_command(out, "sdsat", placement)
    elif settings.mode == "lora":
        step = f"in Python, hf_spec.methods.sdsat.adaptive_tokens.merge_lora(model, {str(out)!r})"
    common.conclude(made["held_back"], step)


@train.command("disco", cls=common.RecordedCommand)
@options.from_settings
def train_disco_command(  # noqa: PLR0913 - one parameter an option
    *,
    model: options.ModelOption,
    responses: common.Responses,
    out: common.AdapterOut,
    draft: Annotated[
        str | None, typer.Option(help="Draft model: folder or Hub id; or use --draft-layers.")
    ] = None,
    draft_layers: Annotated[
        int | None, typer.Option(min=1, help="Draft with the target's own first layers.")
    ] = None,
    settings: DiscoTrainSettings,
    task: Annotated[
        list[str] | None, typer.Option(help="Learn from this task alone; may be repeated.")
    ] = None,
    placement: options.Placement,
) -> None:
    """Train the classifier that tells a draft model when to stop.

    It learns from the target's own answers whether each token of the draft model would have been
    accepted. Then choose its threshold with `hf-spec calibrate disco`, and use it:
    model.generate(..., spec_strategy="disco", assistant=OUT).

        hf-spec train disco --model MODEL --responses answers.jsonl --draft DRAFT --out my-disco
    """
    from hf_spec.cli.loading import load_target
    from hf_spec.methods.disco.training import train_disco
    from hf_spec.training.responses import read_responses
    from hf_spec.training.trainer import processes

    if (draft is None) == (draft_layers is None):
        raise typer.BadParameter("give either --draft or --draft-layers")
    named: Any = draft if draft is not None else {"truncated": draft_layers}
    answers = list(read_responses(responses))
    target = load_target(model, placement)
    adapter = train_disco(target, named, answers, out, settings, task)
    if processes().is_main_process:
        # What the classifier and the fixed rules predict on prompts that were held back.
        validation = adapter.options["validation"]
        common.show_table(
            f"{validation['acceptance']:.0%} of the positions held back are accepted",
            ("rule", "class", "precision", "recall", "F1"),
            (
                (rule, name, *(f"{found[key]:.2f}" for key in ("precision", "recall", "f1")))
                for rule, classes in validation["rules"].items()
                for name, found in classes.items()
            ),
        )
        typer.echo(f"next: {common.bench_command(model, f'disco@{out}', placement)}")
