"""Training of Medusa heads on the target's own answers (`hf-spec train medusa`).

Only the heads are trained ("Medusa-1", Cai et al. 2024, arXiv 2401.10774, section 2.2). They start
as the target's output head: residual blocks are zero, projections its rows. Head k learns the
target's distribution of the token k + 1 positions after the feature's, where the target has read
all tokens between (the paper's self-distillation, section 2.3)::

    loss = sum_k w_k CE(target distribution over the R draft tokens, head k)
    w_k  = step_weight^k / sum_k step_weight^k
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead
from hf_spec.common.errors import OptionError
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.feature_pairs.teacher import Teacher, cross_entropy, output_rows
from hf_spec.methods.medusa.heads import MEDUSA, MedusaHeads, build_medusa
from hf_spec.methods.medusa.layouts import TOKEN_MAP, canonical_tensors, for_vllm
from hf_spec.methods.medusa.settings import MEDUSA_RUN, MedusaTrainSettings
from hf_spec.training.features import LAST, Text
from hf_spec.training.heads import (
    CardText,
    HeadRun,
    as_stored,
    check_family,
    falling_weights,
    run_head_training,
)
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.pairs import read_pairs
from hf_spec.training.responses import answer_vocabulary
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch

CARD = CardText("Medusa heads", "medusa", "vLLM", "medusa", "heads")


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train medusa`."""
    return run_head_training(job, LAST, train_medusa, start_heads)


def train_medusa(
    model: PreTrainedModel,
    texts: Sequence[Text],
    folder: Path,
    settings: MedusaTrainSettings,
    run: TrainSettings = MEDUSA_RUN,
    start: PublishedHead | None = None,
) -> dict[str, float]:
    """Train Medusa heads on a frozen target's answers and write them to `folder`.

    See `hf_spec.methods.eagle.training.train_eagle`; stored features must be the last hidden
    states. The vocabulary of `start` is kept.
    """
    check_plain_head(model)
    training = HeadRun(model, texts, settings, run, start)
    torch.manual_seed(run.seed)
    if start is None:
        heads = build_medusa(new_heads(model, training.learned, settings, folder), model)
    else:
        heads = start_heads(start, model, settings)
    trained = heads.named_weights()
    metrics = training.train(trained, LevelsLoss(heads, model, settings), folder)
    training.write(folder, *for_vllm(as_stored(trained), heads.vocabulary, model), CARD)
    return metrics


def new_heads(
    model: PreTrainedModel, texts: Sequence[Text], settings: MedusaTrainSettings, folder: Path
) -> PublishedHead:
    """Return untrained heads, which all predict what the target predicts next.

    Their draft vocabulary are the most frequent tokens of the answers in `texts`.
    """
    answers = (text.response for text in texts)
    vocabulary = answer_vocabulary(model, answers, settings.vocabulary_size)
    size = model.config.get_text_config().hidden_size
    tensors: dict[str, Tensor] = {}
    for level in range(settings.num_heads):
        for block in range(settings.num_layers):
            tensors[f"{level}.{block}.linear.weight"] = torch.zeros(size, size)
            tensors[f"{level}.{block}.linear.bias"] = torch.zeros(size)
        tensors[f"{level}.{settings.num_layers}.weight"] = output_rows(model, vocabulary)
    if vocabulary is not None:
        tensors[TOKEN_MAP] = vocabulary
    return PublishedHead(MEDUSA, {}, tensors, folder, str(folder))


def start_heads(
    start: PublishedHead, model: PreTrainedModel, settings: MedusaTrainSettings
) -> MedusaHeads:
    """Return the heads to start from; `OptionError` or `AssistantError` if they do not fit."""
    check_family(start, (MEDUSA,))
    heads = build_medusa(start, model)
    sizes = {len(blocks) for blocks in heads.blocks}  # type: ignore[arg-type]
    wanted = settings.num_heads, {settings.num_layers}
    if (heads.num_levels, sizes) != wanted:
        raise OptionError(
            f"the head to start from, {start.name!r}, has {heads.num_levels} heads of "
            f"{max(sizes)} layers, not {settings.num_heads} of {settings.num_layers}; set "
            f"num_heads={heads.num_levels} and num_layers={max(sizes)}"
        )
    stored = canonical_tensors(start)
    for level in range(heads.num_levels):
        # Heads without projections share the target's, which is not trained.
        name = f"{level}.{settings.num_layers}.weight"
        stored.setdefault(name, output_rows(model, heads.vocabulary))
    # Separate copies: one projection may be stored for all heads.
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    if heads.vocabulary is not None:
        tensors[TOKEN_MAP] = heads.vocabulary
    return build_medusa(PublishedHead(MEDUSA, {}, tensors, start.folder, start.name), model)


class LevelsLoss:
    """Loss of Medusa heads, with a frozen target as the teacher."""

    def __init__(self, heads: MedusaHeads, target: PreTrainedModel, settings: MedusaTrainSettings):
        self.heads, self.target, self.settings = heads, target, settings
        self.teacher = Teacher(target, heads.vocabulary)
        self.weights = falling_weights(settings.step_weight, heads.num_levels)

    def __call__(self, batch: MicroBatch[Text]) -> tuple[Tensor, int]:
        """Return the loss summed over the learned positions, and their number."""
        pairs = read_pairs(self.target, batch.items, 1, self.settings.max_context)
        total = torch.zeros((), device=pairs.tokens.device)
        for level, weight in enumerate(self.weights):
            known = pairs.has_level(level)
            rows, positions = pairs.rows[known], pairs.positions[known]
            probs = self.teacher.probs_at(pairs, rows, positions + level)
            logits = self._logits(pairs.features[rows, positions], level)
            total = total + cross_entropy(logits, probs).sum() * weight
        return total, len(pairs.positions)

    @torch.no_grad()
    def matches(self, texts: Sequence[Text]) -> list[Tensor]:
        """Return per text (answer tokens, heads) bool: which tokens of greedy drafts are correct.

        Row n is the draft whose first token is answer token n. Tokens past the text count as wrong.
        """
        pairs = read_pairs(self.target, texts, 1)
        length = len(pairs.positions)
        correct = torch.zeros(length, self.heads.num_levels, dtype=torch.bool)
        for level in range(self.heads.num_levels):
            known = pairs.has_level(level)
            rows, positions = pairs.rows[known], pairs.positions[known]
            chosen = self._logits(pairs.features[rows, positions], level).argmax(dim=-1)
            if self.heads.vocabulary is not None:
                chosen = self.heads.vocabulary.to(chosen.device)[chosen]
            hits = chosen == pairs.tokens[rows, positions + level + 1]
            correct[known.cpu(), level] = hits.cpu()
        return list(correct.split(pairs.counts))

    def _logits(self, features: Tensor, level: int) -> Tensor:
        dtype = next(self.heads.parameters()).dtype
        with self.teacher.autocast():
            return self.heads.draft_logits(features.to(dtype), level)
