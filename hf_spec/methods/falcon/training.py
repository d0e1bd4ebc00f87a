"""Training of a Falcon head on the target's own answers (`hf-spec train falcon`).

The head starts from the target's last layers and the sum of its two inputs, and is trained by
coupled sequential glancing distillation (`hf_spec.methods.falcon.csgd`). The loss covers answers
only. Every micro-batch draws where blocks begin, since generations have every alignment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.common.errors import OptionError
from hf_spec.methods.falcon.csgd import GlancingLoss
from hf_spec.methods.falcon.drafter import resolve_falcon_head
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.falcon.settings import (
    FALCON_RUN,
    CsgdSettings,
    FalconShape,
    FalconTrainSettings,
)
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.training.answers import answer_batches, learned_from
from hf_spec.training.features import LAST, Text, fused_layers, num_features, text_features
from hf_spec.training.held_out import acceptance, learned_and_held
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.pairs import cut_prompt, read_pairs
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.rollouts import OnlineTraining
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import micro_batches, mixed_precision, save_trained, train

# Texts that the root mean squares of features are measured on.
SAMPLE = 32
# Texts per forward pass of the evaluation on the held-out set.
EVALUATED = 8


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train falcon`."""
    texts = job.texts(fused_layers(job.target) if job.settings.shape.fused else LAST)
    start = None if job.options.init is None else load_adapter(job.options.init, METHOD)
    adapter = train_falcon(job.target, texts, job.out, job.settings, job.run, start)
    return TrainingResult(adapter.options["held_back"])


def train_falcon(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: FalconTrainSettings,
    run: TrainSettings = FALCON_RUN,
    start: SpecAdapter | None = None,
) -> SpecAdapter:
    """Train a head on a frozen target's answers and write its adapter to `folder`.

    Checkpoints and metrics are written to its `training` folder. Several answers to one prompt
    share an id. Training continues from `start`, by default from the target's last layers. The
    vocabulary of `start` is chosen again, unless the settings keep it, and it may become fused.

    Raises:
        UnsupportedError: if the target changes its logits after the output head.
        OptionError: if the training set or the held-out set is empty, `start` has another shape, or
            its vocabulary is to be kept and there is no `start`.
        AssistantError: if `start` belongs to another model.
    """
    check_plain_head(model)
    learned, held = learned_and_held(texts, settings.held_back, "texts")
    torch.manual_seed(run.seed)
    head = _new_head(model, learned, settings, start)
    entered = model.config.get_text_config().num_hidden_layers - head.shape.num_layers
    sizes = hidden_sizes(model, learned[:SAMPLE], (entered, *head.hidden_layers))
    _initialize(head, sizes, start)
    context = settings.max_context
    size = float(sizes[-1].square().mean().sqrt())
    loss = GlancingLoss(head, model, settings.csgd, run.epochs, size, context)
    lengths = [num_features(t.response) - cut_prompt(t.response, context) for t in learned]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        head.eval()
        batches = [held[begin : begin + EVALUATED] for begin in range(0, len(held), EVALUATED)]
        matches = [match for batch in batches for match in first_choices(head, model, batch)]
        head.train()
        return acceptance(matches)

    # The name only: adapters are shared, and must not contain paths of this machine.
    started = start.folder.name if start is not None and start.folder is not None else None
    facts = {**asdict(settings), "texts": len(texts), "start": started}
    head.train()
    inputs = {**facts, **learned_from(model, [text.response for text in texts])}
    figures = train(head.trained(), loss, epochs, run, folder / "training", evaluate, inputs)
    record = {"training": {**facts, **run.recorded}, "held_back": figures}
    return save_trained(folder, head.to_adapter({"max_depth": settings.max_depth, **record}))


def online_training(model: PreTrainedModel, assistant: Any) -> OnlineTraining:
    """Return how a Falcon head learns from rollouts of `model`."""
    check_plain_head(model)
    head = resolve_falcon_head(assistant, model)
    settings = CsgdSettings(schedule="off", noise="off", soft_weight=1.0, hard_weight=0.1)

    def make_loss() -> GlancingLoss:
        # A vocabulary has copies of rows of the target's output head.
        head.head.read_rows(model.get_output_embeddings())
        return GlancingLoss(head, model, settings, 1, feature_size=1.0)

    return OnlineTraining(
        head=head,
        layers=head.hidden_layers,
        trained=lambda: list(head.trained().values()),
        make_loss=make_loss,
    )


def _new_head(
    model: PreTrainedModel,
    learned: Sequence[Text],
    settings: FalconTrainSettings,
    start: SpecAdapter | None,
) -> FalconHead:
    if settings.keep_vocabulary and start is None:
        raise OptionError(
            "keep_vocabulary requires a head to start from; pass one, or leave it out"
        )
    responses = (text.response for text in learned)
    vocabulary = answer_vocabulary(model, responses, settings.vocabulary_size)
    if start is not None:
        chosen: dict[str, Any] = {} if settings.keep_vocabulary else {"vocabulary": vocabulary}
        head = FalconHead.from_adapter(start, model, fused=settings.shape.fused, **chosen)
        if head.shape != settings.shape:
            raise OptionError(
                f"the head to start from has the shape {asdict(head.shape)}, not "
                f"{asdict(settings.shape)}"
            )
        for parameter in head.trained().values():
            parameter.requires_grad_(True)
        return head
    return FalconHead(model, settings.shape, vocabulary)


def _initialize(head: FalconHead, sizes: Sequence[Tensor], start: SpecAdapter | None) -> None:
    """Initialize what does not come from `start`.

    `sizes` are those of the states that the copied layers read, and of `head.hidden_layers`.
    """
    entering, *read = sizes
    if start is None:
        head.start_plain(read[-1], float(entering.square().mean().sqrt()))
    was_fused = start is not None and FalconShape(**start.options["shape"]).fused
    if head.shape.fused and not was_fused:
        head.start_fusing(torch.cat(read))


def hidden_sizes(
    model: PreTrainedModel, texts: Sequence[Text], layers: Sequence[int]
) -> tuple[Tensor, ...]:
    """Return (H,) float32 per layer, the root mean square of each dimension of its states."""
    batches = answer_batches([text.response for text in texts], num_features)
    states = [state for batch in batches for state in text_features(model, batch, layers)]
    return torch.cat(states).float().square().mean(dim=0).sqrt().chunk(len(layers))


@torch.no_grad()
def first_choices(head: FalconHead, model: PreTrainedModel, texts: Sequence[Text]) -> list[Tensor]:
    """Return per text (answer tokens, k) bool: True if slot j of the block drafted there is right.

    Row n belongs to the draft whose first token is token n of the answer, and its slot j to the
    token j positions later. Slots after the text count as wrong. Every position ends a block for
    one of k grids, so k forward passes over the target's features and tokens cover all of them.
    """
    k = head.shape.block_size
    pairs = read_pairs(model, texts, k, layers=head.hidden_layers)
    with mixed_precision(model):
        features = head.fuse(pairs.features.split(head.hidden_size, dim=-1))
    length = pairs.tokens.shape[1]
    right = torch.zeros(len(texts), length + 1, k, dtype=torch.bool, device=model.device)
    index_of = head.head.indices().to(model.device)
    answers = index_of[pairs.tokens[pairs.rows, pairs.positions + k]]
    for grid in range(k):
        with mixed_precision(model):
            predicted = head(pairs.tokens, features, grid)[pairs.rows, pairs.positions]
            choice = head.head.draft_logits(predicted).argmax(dim=-1)
        slot = (pairs.positions - grid) % k
        # Pair i in slot j belongs to the block that ends k - 1 - j pairs later.
        last = (pairs.positions + k - 1 - slot).clamp_max(length)
        right[pairs.rows, last, slot] = choice == answers
    return [
        right[row, first + k - 1 : stop + k - 1].cpu()
        for row, (first, stop) in enumerate(pairs.span)
    ]
