"""Training of a truncated draft model on the target's own answers (`hf-spec train draft`).

The target's first layers with a LoRA learn its next-token distribution, on answer tokens only::

    loss = (1 - hard_weight) CE(p, q) + hard_weight CE(chosen token, q)

p are the target's top probabilities, renormalized over the R tokens that the draft model can draft,
and q is the draft model's distribution. Chosen tokens outside R have no hard loss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter
from hf_spec.methods.draft_model.settings import DRAFT_RUN, DraftTrainSettings
from hf_spec.methods.draft_model.trained import TrainableDraft
from hf_spec.methods.draft_model.truncated import without_head
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.training.answers import Example, learned_from
from hf_spec.training.held_out import learned_and_held, tau
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.responses import Response, answer_vocabulary
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch, micro_batches, mixed_precision, save_trained, train

# Chain lengths whose tau is reported.
TAU_LENGTHS = (1, 3, 5)


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train draft`."""
    adapter = train_draft(job.target, job.examples(), job.out, job.settings, job.run)
    return TrainingResult(adapter.options["held_back"])


def train_draft(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: DraftTrainSettings,
    run: TrainSettings = DRAFT_RUN,
) -> SpecAdapter:
    """Train a draft model on a frozen target's answers and write its adapter to `folder`.

    Checkpoint and metrics are written to its `training` folder. Raises `UnsupportedError` if the
    target changes its logits after the head, `OptionError` if a set of answers is empty.
    """
    check_plain_head(model)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    responses = (example.response for example in learned)
    vocabulary = answer_vocabulary(model, responses, settings.vocabulary_size)
    torch.manual_seed(run.seed)
    draft = TrainableDraft(model, settings.num_layers, settings.rank, vocabulary)
    parameters = {n: p for n, p in draft.model.named_parameters() if p.requires_grad}
    distillation = _Distillation(draft, settings.hard_weight)
    epochs = micro_batches(learned, [e.response.num_tokens for e in learned], run)

    def evaluate() -> dict[str, float]:
        return acceptance(distillation.matches([held[i : i + 16] for i in range(0, len(held), 16)]))

    record = {**asdict(settings), "examples": len(examples)}
    facts = {**record, **learned_from(model, [example.response for example in examples])}
    log = folder / "training"
    metrics = train(parameters, distillation.loss, epochs, run, log, evaluate, facts)
    options = {"training": {**record, **run.recorded}, "held_back": metrics}
    return save_trained(folder, draft.to_adapter(options))


class _Distillation:
    """Losses of a draft model on batches of examples, and its agreement with the target."""

    def __init__(self, draft: TrainableDraft, hard_weight: float):
        self.model, self.head = draft.model.eval(), draft.head
        self.hard_weight = hard_weight
        # (V,) index of each token in the draft vocabulary, -1 outside.
        self._indices = self.head.indices()

    def loss(self, batch: MicroBatch[Example]) -> tuple[Tensor, int]:
        """Return the loss summed over answer tokens, and their number."""
        logits, chosen = self._logits([example.response for example in batch.items])
        scores = logits.float().log_softmax(dim=-1)
        top = torch.cat([example.top_tokens for example in batch.items])
        probs = torch.cat([example.top_probs for example in batch.items]).to(scores.device)
        top, chosen = self._indices[top].to(scores.device), chosen.to(scores.device)
        probs = probs * (top >= 0)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        soft = -(probs * scores.gather(-1, top.clamp_min(0))).sum()
        hard = F.nll_loss(scores, chosen, ignore_index=-1, reduction="sum")
        return (1 - self.hard_weight) * soft + self.hard_weight * hard, len(chosen)

    @torch.no_grad()
    def matches(self, batches: Sequence[Sequence[Example]]) -> list[Tensor]:
        """Return per answer (T,) bool: the draft model's first choice is the target's token."""
        matches: list[Tensor] = []
        for batch in batches:
            logits, chosen = self._logits([example.response for example in batch])
            same = logits.argmax(dim=-1).cpu() == chosen
            matches.extend(same.split([len(example.response.response) for example in batch]))
        return matches

    def _logits(self, batch: Sequence[Response]) -> tuple[Tensor, Tensor]:
        """Return (answer tokens, R) logits, and each answer token's index in R, -1 outside."""
        texts = [torch.tensor([*item.prompt, *item.response[:-1]]) for item in batch]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        rows = [row for row, item in enumerate(batch) for _ in item.response]
        positions = [len(item.prompt) - 1 + i for item in batch for i in range(len(item.response))]
        device = self.model.device
        with mixed_precision(self.model):
            hidden = without_head(self.model)(input_ids=ids.to(device), use_cache=False)[0]
            logits = self.head.draft_logits(hidden[rows, positions])
        return logits, self._indices[[token for item in batch for token in item.response]]


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Return the share of agreeing tokens, and tau of greedy chains of `TAU_LENGTHS`.

    `matches`, (T,) bool per answer, were computed on the target's text. They give the exact tau: a
    drafted token is accepted only if all before it agree, so the draft's context was that text.
    """
    metrics = {"agreement": float(torch.cat(list(matches)).float().mean())}
    for length in TAU_LENGTHS:
        runs = []
        for answer in matches:
            # Length of the run of agreeing tokens from each position on, counted from the end.
            row = [0]
            for same in reversed(answer.tolist()):
                row.append(row[-1] + 1 if same else 0)
            runs.append([min(count, length) for count in row[:0:-1]])
        metrics[f"tau_{length}"] = tau(runs)
    return metrics
