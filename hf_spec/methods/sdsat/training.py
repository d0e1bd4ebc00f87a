"""Training of adaptive tokens on the target's own answers (`hf-spec train sdsat`).

Losses (Liu and Zhu 2024, arXiv 2403.18647, section 2.2), with f the mean cross-entropy (eq. 7), Y
the clean text and M the mixed text, in which windows of adaptive tokens replace tokens (eq. 4)::

    basic,    eq. 8:  f(M)
    improved, eq. 9:  (f(Y) + w f(M) at adaptive positions) / 2

Only answer tokens have a loss. Choices that the paper leaves open:

- Y and M are the same texts, as eq. 9 says literally.
- Both sums of eq. 9 are divided by the number of answer tokens, not of adaptive positions.
- With a frozen base (modes "gated" and "embeddings") the clean half trains nothing and is skipped;
  the mean is over the adaptive positions, which only scales the loss.

Layouts of the mixed text:

- "replaced", the paper's: adaptive tokens replace tokens of the text. Later tokens attend to them,
  and a window attends to earlier windows.
- "branches", ours, for a frozen base: windows are branches of a tree on the clean text, as in
  decoding. No window attends to another one. The clean text runs once without gradients, and only
  adaptive positions need them, which is cheaper.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.folder import BaseModel, SpecAdapter
from hf_spec.common.errors import OptionError
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.draft_model.truncated import without_head
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.sdsat.adaptive_tokens import CONFIG_ENTRY, AdaptiveShape, AdaptiveTokens
from hf_spec.methods.sdsat.gated_lora import new_lora
from hf_spec.methods.sdsat.infilling import Infilling
from hf_spec.methods.sdsat.settings import SDSAT_RUN, SdsatTrainSettings
from hf_spec.methods.sdsat.training_chains import (
    EVALUATION_BATCH,
    Text,
    agreement,
    draw_windows,
    run_chains,
    slots_of,
)
from hf_spec.training.answers import Example, learned_from
from hf_spec.training.held_out import learned_and_held
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import (
    Loss,
    MicroBatch,
    micro_batches,
    mixed_precision,
    processes,
    save_trained,
    train,
)

# (text, position) of inputs, each of which predicts the next position.
Positions = Sequence[tuple[int, int]]


def run_training(job: TrainingJob) -> TrainingResult:
    """Run `hf-spec train sdsat`."""
    settings, target = job.settings, job.target
    needs_tokenizer = settings.infilling or settings.mode == "full"
    tokenizer = job.load_tokenizer() if needs_tokenizer else None
    if settings.soft_weight:
        examples = job.examples()
    else:
        examples = [Example.without_teacher(answer) for answer in job.answers()]
    adapter = train_sdsat(target, examples, job.out, settings, job.run, tokenizer)
    options = getattr(target.config, CONFIG_ENTRY) if adapter is None else adapter.options
    merge = f"in Python, hf_spec.methods.sdsat.adaptive_tokens.merge_lora(model, {str(job.out)!r})"
    return TrainingResult(
        options["held_back"],
        whole_model=settings.mode == "full",
        next_step=merge if settings.mode == "lora" else None,
    )


def train_sdsat(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: SdsatTrainSettings,
    run: TrainSettings = SDSAT_RUN,
    tokenizer: Any = None,
) -> SpecAdapter | None:
    """Train adaptive tokens and write their adapter, or the fine-tuned model, to `folder`.

    Checkpoint and metrics are written to its `training` folder. Mode "full" trains `model` in
    place and returns None. The tokenizer is for infilling, and is saved with a fine-tuned model.
    Raises `UnsupportedError` if the target changes its logits after the head, `OptionError` if a
    set of answers is empty.
    """
    check_plain_head(model)
    run = settings.resolved_run(run)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    markers = settings.infilling_markers
    infilling = Infilling.of(tokenizer, markers) if settings.infilling else None
    base = BaseModel.of(model)
    torch.manual_seed(run.seed)
    student = Student(model, settings, infilling)
    epochs = micro_batches(learned, [e.response.num_tokens for e in learned], run)

    def evaluate() -> dict[str, float]:
        texts = [Text.of(example) for example in held]
        tokens, positions = student.decoding_tokens(), settings.evaluated_positions
        figures = agreement(model, tokens, texts, settings.window, positions)
        # With a frozen base it is that of the base.
        return figures if settings.frozen else {**figures, "clean_loss": student.clean_loss(texts)}

    record = {**asdict(settings), "examples": len(examples)}
    log = folder / "training"
    try:
        facts = {**record, **learned_from(model, [example.response for example in examples])}
        metrics = train(student.parameters, student.loss, epochs, run, log, evaluate, facts)
    finally:
        student.release()
    options = {
        "num_adaptive": settings.num_adaptive or settings.window,
        "training": {**record, **run.recorded},
        "held_back": metrics,
    }
    if settings.mode != "full":
        return save_trained(folder, student.tokens.to_adapter(base, options))
    if processes().is_main_process:
        entry = {"token_ids": list(student.token_ids), "window": settings.window, **options}
        setattr(model.config, CONFIG_ENTRY, entry)
        generation: Any = model.generation_config
        # Adaptive tokens must not be generated, with or without SDSAT.
        suppressed = {*(generation.suppress_tokens or ()), *student.token_ids}
        generation.suppress_tokens = sorted(suppressed)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return None


class Student:
    """Trained parameters of a target, and their losses.

    In mode "full" `token_ids` are vocabulary rows, and `tokens` hold the model's whole table.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: SdsatTrainSettings,
        infilling: Infilling | None = None,
    ):
        self.model, self.settings, self.infilling = model, settings, infilling
        self.token_ids: list[int] = []
        self._required_grad = [(p, p.requires_grad) for p in model.parameters()]
        shape = AdaptiveShape(settings.mode, settings.diverse, settings.window)
        if settings.mode == "full":
            self.token_ids = _vocabulary_rows(model, settings)
            model.requires_grad_(True)
            self.parameters = dict(model.named_parameters())
            table: Any = model.get_input_embeddings()
            self.tokens = AdaptiveTokens(shape, table.weight)
            return
        model.requires_grad_(False)
        embeddings = nn.Parameter(_mean_embedding(model).repeat(settings.num_kinds, 1))
        has_lora = settings.mode != "embeddings"
        lora = new_lora(model, settings.rank, settings.targets) if has_lora else {}
        self.tokens = AdaptiveTokens(shape, embeddings, lora)
        self.parameters = {"embeddings": embeddings}
        for name, (down, up) in lora.items():
            self.parameters |= {f"{name}.down": down, f"{name}.up": up}

    def release(self) -> None:
        """Restore `requires_grad` of the model's weights."""
        for parameter, required in self._required_grad:
            parameter.requires_grad_(required)

    def decoding_tokens(self) -> AdaptiveTokens:
        """Return the adaptive tokens as decoding uses them, also in mode "full"."""
        if not self.token_ids:
            return self.tokens
        table: Any = self.model.get_input_embeddings()
        ids = torch.tensor(self.token_ids, device=table.weight.device)
        return AdaptiveTokens(self.tokens.shape, table(ids))

    def loss(self, batch: MicroBatch[Example]) -> Loss:
        """Return the summed loss of a micro-batch, and the number of tokens to divide it by."""
        generator = torch.Generator().manual_seed(batch.seed)
        texts = [self._text(example, generator) for example in batch.items]
        length, share = self.settings.window, self.settings.start_share
        windows = [draw_windows(text.free(), length, generator, share) for text in texts]
        if self.settings.chosen_layout == "branches":
            return self._branched(texts, windows)
        slots = [slots_of(w, len(text.tokens)) for w, text in zip(windows, texts, strict=True)]
        return self._replaced(texts, slots)

    @torch.no_grad()
    def clean_loss(self, texts: Sequence[Text]) -> float:
        """Return the mean cross-entropy of the answers in clean texts, f(Y) of eq. 9 (figure 5)."""
        total, count = 0.0, 0
        for begin in range(0, len(texts), EVALUATION_BATCH):
            batch = texts[begin : begin + EVALUATION_BATCH]
            answer = _answer_positions(batch)
            logits = self._logits(batch, None, answer).float()
            labels = torch.tensor([batch[row].tokens[p + 1] for row, p in answer])
            losses = nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="sum")
            total, count = total + float(losses), count + len(answer)
        return total / max(count, 1)

    def _text(self, example: Example, generator: torch.Generator) -> Text:
        """Return prompt and answer, or by chance the answer alone in infilling format."""
        if (
            self.infilling is None
            or example.response.task != self.settings.infilling_task
            or float(torch.rand((), generator=generator)) >= self.settings.infilling
        ):
            return Text.of(example)
        tokens = self.infilling.arrange(example.response.response, generator)
        # No prompt, since the first marker replaces it; no target distributions, since those are
        # for the original order.
        return Text(tokens, 1, self.infilling.markers)

    def _branched(self, texts: Sequence[Text], chains: Sequence[Sequence[tuple[int, int]]]) -> Loss:
        if not any(chains):
            # Answers of one or two tokens have no window; keep a graph with zero gradients.
            sums = torch.stack([parameter.sum() for parameter in self.parameters.values()])
            return 0 * sums.sum(), 0
        with mixed_precision(self.model):
            logits, positions = run_chains(self.model, self.tokens, texts, chains)
        return self._cross_entropy(logits, texts, positions), len(positions)

    def _replaced(self, texts: Sequence[Text], slots: Sequence[Tensor]) -> Loss:
        """Layout "replaced": eq. 8, or eq. 9 (only its second term with a frozen base)."""
        answer = _answer_positions(texts)
        adaptive = [(row, position) for row, position in answer if slots[row][position] >= 0]
        if self.settings.loss == "basic":
            logits = self._logits(texts, slots, answer)
            return self._cross_entropy(logits, texts, answer), len(answer)
        mixed = self._cross_entropy(self._logits(texts, slots, adaptive), texts, adaptive)
        if self.settings.frozen:
            return mixed, len(adaptive)
        clean = self._cross_entropy(self._logits(texts, None, answer), texts, answer)
        return (clean + self.settings.adaptive_weight * mixed) / 2, len(answer)

    def _logits(
        self, texts: Sequence[Text], slots: Sequence[Tensor] | None, positions: Positions
    ) -> Tensor:
        """Return (positions, V) logits of texts in which `slots` (None: none) are adaptive."""
        rows = [torch.tensor(text.tokens) for text in texts]
        token_ids = torch.tensor(self.token_ids or self.tokens.chain(self.settings.num_kinds))
        for index, slot in enumerate(slots or ()):
            kinds = slot if self.settings.diverse else slot.clamp_max(0)
            rows[index] = torch.where(kinds >= 0, token_ids[kinds.clamp_min(0)], rows[index])
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        # Padding on the right is never read, since attention is causal.
        indices = torch.tensor(positions, dtype=torch.long).reshape(-1, 2).T
        device = self.model.device
        with mixed_precision(self.model), self.tokens.active(self.model):
            if self.settings.mode == "full":
                hidden = without_head(self.model)(input_ids=ids.to(device), use_cache=False)[0]
            else:
                with self.tokens.embedded(self.model, ids) as embeddings:
                    hidden = without_head(self.model)(inputs_embeds=embeddings, use_cache=False)[0]
            head: Any = self.model.get_output_embeddings()
            return head(hidden[indices[0], indices[1]])

    def _cross_entropy(self, logits: Tensor, texts: Sequence[Text], positions: Positions) -> Tensor:
        """Return the cross-entropy summed over positions, see `SdsatTrainSettings.soft_weight`."""
        log_probs = logits.float().log_softmax(dim=-1)
        labels = torch.tensor([texts[row].tokens[p + 1] for row, p in positions], dtype=torch.long)
        hard = -log_probs.gather(-1, labels.to(log_probs.device)[:, None])[:, 0]
        share = self.settings.soft_weight
        soft_indices, soft_tokens, soft_probs = [], [], []
        for index, (row, position) in enumerate(positions):
            text = texts[row]
            if share and text.top_tokens is not None and text.top_probs is not None:
                soft_indices.append(index)
                soft_tokens.append(text.top_tokens[position + 1 - text.first])
                soft_probs.append(text.top_probs[position + 1 - text.first])
        if not soft_indices:
            return hard.sum()
        probs = torch.stack(soft_probs).to(log_probs)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        tokens = torch.stack(soft_tokens).to(log_probs.device)
        soft = -(probs * log_probs[soft_indices].gather(-1, tokens)).sum(dim=-1)
        weights = hard.new_ones(len(positions))
        weights[soft_indices] = 1 - share
        return (weights * hard).sum() + share * soft.sum()


def _answer_positions(texts: Sequence[Text]) -> list[tuple[int, int]]:
    """Return the (text, position) pairs that predict an answer token."""
    return [
        (row, position)
        for row, text in enumerate(texts)
        for position in range(text.first - 1, len(text.tokens) - 1)
    ]


@torch.no_grad()
def _mean_embedding(model: PreTrainedModel) -> Tensor:
    """Return the (H,) float32 mean of the input embeddings of all tokens."""
    table: Any = model.get_input_embeddings()
    ids = torch.arange(table.weight.shape[0], device=table.weight.device)
    sums = [table(part).float().sum(dim=0) for part in ids.split(8192)]
    return torch.stack(sums).sum(0) / len(ids)


def _vocabulary_rows(model: PreTrainedModel, settings: SdsatTrainSettings) -> list[int]:
    """Return the vocabulary rows of the adaptive tokens; append rows unless `token_ids` is set."""
    size = num_embeddings(model)
    if settings.token_ids:
        if not all(token < size for token in settings.token_ids):
            raise OptionError(
                f"token_ids={settings.token_ids}: the model has {size} tokens; choose rows below"
            )
        return list(settings.token_ids)
    model.resize_token_embeddings(size + settings.num_kinds)
    return list(range(size, size + settings.num_kinds))
