"""Training of a truncated draft model on the target's own answers (`hf-spec train draft`).

The first layers of the target with a LoRA learn its next-token distribution: cross-entropy with the
target's top probabilities, renormalised over the tokens that the draft model knows, and a share of
cross-entropy with the token that the target chose. Loss on answers only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.adapters.card import save_with_card
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.models.draft_head import check_plain_head
from hf_spec.models.trained_draft import TrainableDraft
from hf_spec.training.responses import Response, answer_vocabulary
from hf_spec.training.split import learned_and_held
from hf_spec.training.teacher import Example
from hf_spec.training.trainer import (
    MicroBatch,
    TrainSettings,
    micro_batches,
    processes,
    train,
)

# Chain lengths whose tau is reported.
TAU_LENGTHS = (1, 3, 5)


@dataclass(frozen=True)
class DraftTrainSettings:
    """What is trained.

    Attributes:
        num_layers: layers of the draft model.
        rank: of the LoRA.
        vocabulary_size: most frequent tokens that it can propose; None for all.
        hard_weight: share of the cross-entropy with the token that the target chose.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
    """

    num_layers: int = 4
    rank: int = 64
    vocabulary_size: int | None = 8192
    hard_weight: float = 0.3
    held_back: float = 0.03


def train_draft(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: DraftTrainSettings,
    run: TrainSettings,
) -> SpecAdapter:
    """Train a draft model and write its adapter to `folder`.

    Args:
        model: the target; frozen.
        examples: its answers with its opinions.
        folder: receives the adapter; checkpoint and metrics go into its `training` folder.
        settings: what is trained.
        run: how.

    Raises:
        UnsupportedError: if the target changes its logits behind the head.
        OptionError: if nothing is left to train on or to evaluate with.
    """
    check_plain_head(model)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    responses = (example.response for example in learned)
    vocabulary = answer_vocabulary(model, responses, settings.vocabulary_size)
    torch.manual_seed(run.seed)
    draft = TrainableDraft(model, settings.num_layers, settings.rank, vocabulary)
    parameters = {n: p for n, p in draft.model.named_parameters() if p.requires_grad}
    for parameter in parameters.values():
        parameter.data = parameter.data.float()
    teacher = _Distillation(draft, settings.hard_weight)
    lengths = [len(e.response.prompt) + len(e.response.response) for e in learned]
    epochs = micro_batches(learned, lengths, run)

    def evaluate() -> dict[str, float]:
        return acceptance(teacher.matches([held[i : i + 16] for i in range(0, len(held), 16)]))

    facts = {**asdict(settings), "examples": len(examples)}
    figures = train(parameters, teacher.loss, epochs, run, folder / "training", evaluate, facts)
    options = {"training": {**facts, **asdict(run)}, "held_back": figures}
    adapter = draft.to_adapter(options)
    if processes().is_main_process:
        save_with_card(folder, adapter)
    return adapter


class _Distillation:
    """Losses and matches of a draft model on batches of examples."""

    def __init__(self, draft: TrainableDraft, hard_weight: float):
        self.model, self.head = draft.model.eval(), draft.head
        self.hard_weight = hard_weight
        # Per token its place in the draft model's vocabulary, -1 for those it does not know.
        self._places = self.head.places()

    def loss(self, batch: MicroBatch[Example]) -> tuple[Tensor, int]:
        """Summed cross-entropies with the target's probabilities and with its choice."""
        logits = self._logits([example.response for example in batch.items])
        scores = logits.float().log_softmax(dim=-1)
        top = torch.cat([example.top_tokens for example in batch.items])
        probs = torch.cat([example.top_probs for example in batch.items]).to(scores.device)
        chosen = torch.tensor([t for example in batch.items for t in example.response.response])
        top, chosen = self._places[top].to(scores.device), self._places[chosen].to(scores.device)
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
            choice = self._logits([example.response for example in batch]).argmax(dim=-1).cpu()
            chosen = torch.tensor([t for example in batch for t in example.response.response])
            same = choice == self._places[chosen]
            found.extend(same.split([len(example.response.response) for example in batch]))
        return found

    def _logits(self, batch: Sequence[Response]) -> Tensor:
        """(answer tokens, R) logits before each answer token, padding on the right."""
        texts = [[*response.prompt, *response.response[:-1]] for response in batch]
        ids = nn.utils.rnn.pad_sequence([torch.tensor(text) for text in texts], batch_first=True)
        rows = [r for r, response in enumerate(batch) for _ in response.response]
        places = [
            len(response.prompt) - 1 + i
            for response in batch
            for i in range(len(response.response))
        ]
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16):
            hidden = self.model.base_model(input_ids=ids.to(device), use_cache=False)[0]
            return self.head.known(hidden[rows, places])


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Share of agreeing tokens, and tau of greedy chains of some lengths.

    A drafted token is accepted if it and all before it agree, in which case their contexts were
    the target's own; so agreement under the target's text gives the exact tau of a greedy chain.

    Args:
        matches: per answer (T,) bool.
    """
    figures = {"agreement": float(torch.cat(list(matches)).float().mean())}
    for length in TAU_LENGTHS:
        rounds = accepted = 0
        for answer in matches:
            place = 0
            row = answer.tolist()
            while place < len(row):
                run = next((i for i, ok in enumerate(row[place : place + length]) if not ok), None)
                kept = len(row[place : place + length]) if run is None else run
                rounds, accepted, place = rounds + 1, accepted + kept, place + kept + 1
        figures[f"tau_{length}"] = accepted / max(rounds, 1)
    return figures
