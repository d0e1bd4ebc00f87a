"""Training of adaptive tokens on the target's own answers (`hf-spec train sdsat`).

Losses (Liu et al. 2024, arXiv 2403.18647, section 2.2), with f a sum of cross-entropies over n:

- "basic", eq. 8: f of the mixed text, at all of its positions.
- "improved", eq. 9: (f of the clean text + w f of the mixed text at its adaptive positions) / 2.

What the paper leaves open: both halves are the same texts, as eq. 9 says literally; both sums are
divided by n, the answer tokens, and not by the number of adaptive positions. Where the base is
frozen (modes "gated" and "embeddings") the clean half has nothing to learn and is not run, and the
mean is over the adaptive positions; that only scales the loss. Loss on answers only.

Two layouts of a mixed text:

- "replaced", the paper's: adaptive tokens stand in the text in place of others, so what follows
  reads them, and a window reads those before it.
- "branches", ours, for a frozen base: windows hang off the clean text as branches of the engine's
  tree, which is what decoding does. No window sees another one, the clean text is run once without
  gradients, and these are kept for adaptive positions alone: cheaper, and the same as in use.
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
from hf_spec.methods.draft_model.truncated import without_head
from hf_spec.methods.feature_pairs.draft_head import check_plain_head
from hf_spec.methods.sdsat.adaptive_tokens import CONFIG_ENTRY, AdaptiveShape, AdaptiveTokens
from hf_spec.methods.sdsat.gated_lora import new_lora
from hf_spec.methods.sdsat.infilling import Infilling
from hf_spec.methods.sdsat.settings import SDSAT_RUN, SdsatTrainSettings
from hf_spec.methods.sdsat.training_chains import Text, Windows, agreement, draw_windows, run_chains
from hf_spec.training.answers import Example, learned_from
from hf_spec.training.held_out import learned_and_held
from hf_spec.training.job import TrainingJob, TrainingResult
from hf_spec.training.precision import mixed_precision
from hf_spec.training.settings import TrainSettings
from hf_spec.training.trainer import Loss, MicroBatch, micro_batches, processes, save_trained, train

# (text, position) of tokens, each of which predicts the next position.
Places = Sequence[tuple[int, int]]


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

    The target is frozen, but in mode "full" it is what learns, in place. Its opinions are read if
    `soft_weight` is not 0, the tokenizer for infilling and to be saved with a fine-tuned model.
    Checkpoint and metrics go into the `training` folder.

    Returns:
        The adapter; None in mode "full".

    Raises:
        UnsupportedError: if the target changes its logits after the head.
        OptionError: if nothing is left to train on or to evaluate with.
    """
    check_plain_head(model)
    learned, held = learned_and_held(examples, settings.held_back, "examples")
    markers = settings.infilling_markers
    infilling = Infilling.of(tokenizer, markers) if settings.infilling else None
    base = BaseModel.of(model)
    torch.manual_seed(run.seed)
    student = Student(model, settings, infilling)
    epochs = micro_batches(learned, [e.response.num_tokens for e in learned], run)

    def evaluate() -> dict[str, float]:
        texts = [Text.of(example) for example in held]
        tokens, positions = student.used_tokens(), settings.evaluated_positions
        return agreement(model, tokens, texts, settings.window, positions)

    facts = {**asdict(settings), "examples": len(examples)}
    own = folder / "training"
    try:
        known = {**facts, **learned_from(model, [example.response for example in examples])}
        figures = train(student.parameters, student.loss, epochs, run, own, evaluate, known)
    finally:
        student.release()
    options = {
        "num_adaptive": settings.num_adaptive or settings.window,
        "training": {**facts, **asdict(run)},
        "held_back": figures,
    }
    if settings.mode != "full":
        return save_trained(folder, student.tokens.to_adapter(base, options))
    if processes().is_main_process:
        entry = {"token_ids": list(student.token_ids), "window": settings.window, **options}
        setattr(model.config, CONFIG_ENTRY, entry)
        generation: Any = model.generation_config
        # Adaptive tokens are never generated, with or without SDSAT.
        suppressed = {*(generation.suppress_tokens or ()), *student.token_ids}
        generation.suppress_tokens = sorted(suppressed)
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
    return None


class Student:
    """What learns of a target, and its losses; `infilling` arranges code, if that is wanted.

    Attributes:
        tokens: the adaptive tokens; in mode "full" a view of the model's own table.
        parameters: what is trained, by name.
        token_ids: the rows of the vocabulary in mode "full".
    """

    def __init__(
        self,
        model: PreTrainedModel,
        settings: SdsatTrainSettings,
        infilling: Infilling | None = None,
    ):
        self.model, self.settings, self.infilling = model, settings, infilling
        self.token_ids: list[int] = []
        self._needed = [(p, p.requires_grad) for p in model.parameters()]
        shape = AdaptiveShape(settings.mode, settings.diverse, settings.window)
        if settings.mode == "full":
            self.token_ids = _own_rows(model, settings)
            model.requires_grad_(True)
            self.parameters = dict(model.named_parameters())
            table: Any = model.get_input_embeddings()
            self.tokens = AdaptiveTokens(shape, table.weight)
            return
        model.requires_grad_(False)
        embeddings = nn.Parameter(_mean_embedding(model).repeat(settings.num_kinds, 1))
        learns = settings.mode != "embeddings"
        lora = new_lora(model, settings.rank, settings.targets) if learns else {}
        self.tokens = AdaptiveTokens(shape, embeddings, lora, everywhere=settings.mode == "lora")
        self.parameters = {"embeddings": embeddings}
        for name, (down, up) in lora.items():
            self.parameters |= {f"{name}.down": down, f"{name}.up": up}

    def release(self) -> None:
        """Let the model's weights need gradients as they did before."""
        for parameter, needed in self._needed:
            parameter.requires_grad_(needed)

    def used_tokens(self) -> AdaptiveTokens:
        """The adaptive tokens by themselves, also where they are rows of the model's table."""
        if not self.token_ids:
            return self.tokens
        table: Any = self.model.get_input_embeddings()
        own = torch.tensor(self.token_ids, device=table.weight.device)
        return AdaptiveTokens(self.tokens.shape, table(own))

    def loss(self, batch: MicroBatch[Example]) -> Loss:
        """Summed loss of a micro-batch, and the number of tokens that divides it."""
        generator = torch.Generator().manual_seed(batch.seed)
        texts = [self._text(example, generator) for example in batch.items]
        if self.settings.chosen_layout == "branches":
            return self._branched(texts, generator)
        return self._replaced(texts, generator)

    def _text(self, example: Example, generator: torch.Generator) -> Text:
        if (
            self.infilling is None
            or example.response.task != self.settings.infilling_task
            or float(torch.rand((), generator=generator)) >= self.settings.infilling
        ):
            return Text.of(example)
        tokens = self.infilling.arrange(example.response.response, generator)
        # The code alone: its markers stand where a prompt would, and the target's opinions
        # belong to another order.
        return Text(tokens, 1, frozenset(self.infilling.markers))

    def _windows(self, texts: Sequence[Text], generator: torch.Generator) -> list[Windows]:
        length, share = self.settings.window, self.settings.start_share
        return [draw_windows(text.free(), length, generator, share) for text in texts]

    def _branched(self, texts: Sequence[Text], generator: torch.Generator) -> Loss:
        chains = [windows.chains for windows in self._windows(texts, generator)]
        if not any(length for mine in chains for _, length in mine):
            # Answers of a token or two have no place for a window.
            nothing = torch.stack([parameter.sum() for parameter in self.parameters.values()])
            return 0 * nothing.sum(), 0
        with mixed_precision(self.model):
            logits, places = run_chains(self.model, self.tokens, texts, chains)
        return self._cross_entropy(logits, texts, places), len(places)

    def _replaced(self, texts: Sequence[Text], generator: torch.Generator) -> Loss:
        slots = [windows.slots for windows in self._windows(texts, generator)]
        # Positions whose next token is one of the answer.
        everywhere = [
            (row, place)
            for row, text in enumerate(texts)
            for place in range(text.first - 1, len(text.tokens) - 1)
        ]
        adaptive = [(row, p) for row, p in everywhere if slots[row][p] >= 0]
        if self.settings.loss == "basic":
            logits = self._logits(texts, slots, everywhere)
            return self._cross_entropy(logits, texts, everywhere), len(everywhere)
        mixed = self._cross_entropy(self._logits(texts, slots, adaptive), texts, adaptive)
        if self.settings.frozen:
            return mixed, len(adaptive)
        clean = self._cross_entropy(self._logits(texts, None, everywhere), texts, everywhere)
        return (clean + self.settings.adaptive_weight * mixed) / 2, len(everywhere)

    def _logits(
        self, texts: Sequence[Text], slots: Sequence[Tensor] | None, places: Places
    ) -> Tensor:
        """(places, V) of texts with the adaptive tokens that `slots` names, padded on the right."""
        rows = [torch.tensor(text.tokens) for text in texts]
        if slots is not None:
            kinds = [slot if self.settings.diverse else slot.clamp_max(0) for slot in slots]
            rows = [
                torch.where(kind >= 0, self._ids(kind), row)
                for row, kind in zip(rows, kinds, strict=True)
            ]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        chosen = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
        device = self.model.device
        with mixed_precision(self.model), self.tokens.active(self.model):
            if self.settings.mode == "full":
                hidden = without_head(self.model)(input_ids=ids.to(device), use_cache=False)[0]
            else:
                with self.tokens.embedded(self.model, ids) as embeddings:
                    hidden = without_head(self.model)(inputs_embeds=embeddings, use_cache=False)[0]
            head: Any = self.model.get_output_embeddings()
            return head(hidden[chosen[0], chosen[1]])

    def _ids(self, kinds: Tensor) -> Tensor:
        """Token ids of kinds of adaptive tokens, virtual ones but in mode "full"."""
        if not self.token_ids:
            return -1 - kinds
        return torch.tensor(self.token_ids)[kinds.clamp_min(0)]

    def _cross_entropy(self, logits: Tensor, texts: Sequence[Text], places: Places) -> Tensor:
        """Summed over places, a share of it with the target's opinion where that is known."""
        scores = logits.float().log_softmax(dim=-1)
        labels = torch.tensor([texts[row].tokens[p + 1] for row, p in places], dtype=torch.long)
        hard = -scores.gather(-1, labels.to(scores.device)[:, None])[:, 0]
        share = self.settings.soft_weight
        known, tops, chances = [], [], []
        for index, (row, place) in enumerate(places):
            text = texts[row]
            if share and text.top_tokens is not None and text.top_probs is not None:
                known.append(index)
                tops.append(text.top_tokens[place + 1 - text.first])
                chances.append(text.top_probs[place + 1 - text.first])
        if not known:
            return hard.sum()
        probs = torch.stack(chances).to(scores)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        soft = -(probs * scores[known].gather(-1, torch.stack(tops).to(scores.device))).sum(dim=-1)
        weights = hard.new_ones(len(places))
        weights[known] = 1 - share
        return (weights * hard).sum() + share * soft.sum()


@torch.no_grad()
def _mean_embedding(model: PreTrainedModel) -> Tensor:
    """(H,) float32: the mean of what the model's embedding says of its tokens."""
    table: Any = model.get_input_embeddings()
    ids = torch.arange(table.weight.shape[0], device=table.weight.device)
    sums = [table(part).float().sum(dim=0) for part in ids.split(8192)]
    return torch.stack(sums).sum(0) / len(ids)


def _own_rows(model: PreTrainedModel, settings: SdsatTrainSettings) -> list[int]:
    """Rows of the vocabulary for adaptive tokens; appended ones start as the mean of all."""
    table: Any = model.get_input_embeddings()
    size = table.weight.shape[0]
    if settings.token_ids:
        if not all(0 <= token < size for token in settings.token_ids):
            raise OptionError(f"token_ids={settings.token_ids}: the model has {size} tokens")
        return list(settings.token_ids)
    model.resize_token_embeddings(size + settings.num_kinds)
    return list(range(size, size + settings.num_kinds))
