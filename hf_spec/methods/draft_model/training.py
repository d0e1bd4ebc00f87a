"""Training of a truncated draft model on the target's own answers (`hf-spec train draft`).

The first layers of the target with a LoRA learn its next-token distribution: cross-entropy with the
target's top probabilities, renormalised over the tokens that the draft model knows, and a share of
cross-entropy with the token that the target chose. Loss on answers only.
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
from hf_spec.training.held_back import learned_and_held, tau
from hf_spec.training.precision import mixed_precision
from hf_spec.training.responses import Response, answer_vocabulary
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import MicroBatch, micro_batches, save_trained, train

# Chain lengths whose tau is reported.
TAU_LENGTHS = (1, 3, 5)


def train_draft(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: DraftTrainSettings,
    run: TrainSettings = DRAFT_RUN,
) -> SpecAdapter:
    """Train a draft model on a frozen target's answers and write its adapter to `folder`.

    Checkpoint and metrics go into the `training` folder in it.

    Raises:
        UnsupportedError: if the target changes its logits after the head.
        OptionError: if nothing is left to train on or to evaluate with.
    """
    check_plain_head(model)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    responses = (example.response for example in learned)
    vocabulary = answer_vocabulary(model, responses, settings.vocabulary_size)
    torch.manual_seed(run.seed)
    draft = TrainableDraft(model, settings.num_layers, settings.rank, vocabulary)
    parameters = {n: p for n, p in draft.model.named_parameters() if p.requires_grad}
    teacher = _Distillation(draft, settings.hard_weight)
    epochs = micro_batches(learned, [e.response.num_tokens for e in learned], run)

    def evaluate() -> dict[str, float]:
        return acceptance(teacher.matches([held[i : i + 16] for i in range(0, len(held), 16)]))

    facts = {**asdict(settings), "examples": len(examples)}
    known = {**facts, **learned_from(model, [example.response for example in examples])}
    figures = train(parameters, teacher.loss, epochs, run, folder / "training", evaluate, known)
    options = {"training": {**facts, **asdict(run)}, "held_back": figures}
    return save_trained(folder, draft.to_adapter(options))


class _Distillation:
    """Losses and matches of a draft model on batches of examples."""

    def __init__(self, draft: TrainableDraft, hard_weight: float):
        self.model, self.head = draft.model.eval(), draft.head
        self.hard_weight = hard_weight
        # Per token its place in the draft model's vocabulary, -1 for those it does not know.
        self._places = self.head.places()

    def loss(self, batch: MicroBatch[Example]) -> tuple[Tensor, int]:
        """Summed cross-entropies with the target's probabilities and with its choice."""
        logits, chosen = self._logits([example.response for example in batch.items])
        scores = logits.float().log_softmax(dim=-1)
        top = torch.cat([example.top_tokens for example in batch.items])
        probs = torch.cat([example.top_probs for example in batch.items]).to(scores.device)
        top, chosen = self._places[top].to(scores.device), chosen.to(scores.device)
        probs = probs * (top >= 0)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        soft = -(probs * scores.gather(-1, top.clamp_min(0))).sum()
        hard = F.nll_loss(scores, chosen, ignore_index=-1, reduction="sum")
        return (1 - self.hard_weight) * soft + self.hard_weight * hard, len(chosen)

    @torch.no_grad()
    def matches(self, batches: Sequence[Sequence[Example]]) -> list[Tensor]:
        """Per answer (T,) bool: whether the draft model's first choice was the target's."""
        found: list[Tensor] = []
        for batch in batches:
            logits, chosen = self._logits([example.response for example in batch])
            same = logits.argmax(dim=-1).cpu() == chosen
            found.extend(same.split([len(example.response.response) for example in batch]))
        return found

    def _logits(self, batch: Sequence[Response]) -> tuple[Tensor, Tensor]:
        """(answer tokens, R) logits before each answer token, and where it stands in R, or -1."""
        texts = [torch.tensor([*one.prompt, *one.response[:-1]]) for one in batch]
        ids = nn.utils.rnn.pad_sequence(texts, batch_first=True)
        rows = [row for row, one in enumerate(batch) for _ in one.response]
        places = [len(one.prompt) - 1 + i for one in batch for i in range(len(one.response))]
        device = self.model.device
        with mixed_precision(self.model):
            hidden = without_head(self.model)(input_ids=ids.to(device), use_cache=False)[0]
            logits = self.head.draft_logits(hidden[rows, places])
        return logits, self._places[[token for one in batch for token in one.response]]


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Share of agreeing tokens, and tau of greedy chains of some lengths.

    A drafted token is accepted if it and all before it agree, in which case their contexts were the
    target's own; so `matches` under the target's text, (T,) bool per answer, give the exact tau.
    """
    figures = {"agreement": float(torch.cat(list(matches)).float().mean())}
    for length in TAU_LENGTHS:
        runs = []
        for answer in matches:
            # Agreeing tokens in a row from each position on, counted from the end.
            row = [0]
            for same in reversed(answer.tolist()):
                row.append(row[-1] + 1 if same else 0)
            runs.append([min(count, length) for count in row[:0:-1]])
        figures[f"tau_{length}"] = tau(runs)
    return figures
