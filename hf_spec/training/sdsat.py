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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.adapters.folder import BaseModel, SpecAdapter, save_adapter
from hf_spec.decoding.runner import ModelRunner
from hf_spec.decoding.tree import DraftTree
from hf_spec.errors import OptionError
from hf_spec.models.adaptive_tokens import (
    CONFIG_ENTRY,
    MODES,
    AdaptiveShape,
    AdaptiveTokens,
)
from hf_spec.models.draft_head import check_plain_head
from hf_spec.models.gated_lora import new_lora
from hf_spec.training.infilling import Infilling
from hf_spec.training.split import split_by_hash
from hf_spec.training.teacher import Example
from hf_spec.training.trainer import Loss, TrainSettings, shuffled_batches, train
from hf_spec.training.windows import START_SHARE, draw_windows, free_positions, window_length

FROZEN_BASE = ("gated", "embeddings")
LAYOUTS = ("branches", "replaced")
LOSSES = ("improved", "basic")
# Texts of one forward when the held-back ones are evaluated.
EVALUATED = 8


@dataclass(frozen=True)
class SdsatTrainSettings:
    """What is trained.

    Attributes:
        mode: "gated", "embeddings", "lora" or "full", see `hf_spec.models.adaptive_tokens`.
        window: L, the longest window.
        diverse: one adaptive token per place instead of one for all.
        rank: of the LoRA.
        targets: layers that get a LoRA, by the last part of their names; all linear ones if empty.
        loss: "improved" or "basic", see the module.
        layout: "branches" or "replaced"; None is the first for a frozen base, else the second.
        start_share: of the answer's positions, where windows start.
        adaptive_weight: w of eq. 9.
        soft_weight: share of the cross-entropy with the target's own distribution.
        infilling: probability that a text of `infilling_task` is put into infilling format, one
            half PSM and one half SPM; 0.5 in the paper.
        infilling_task: which texts are code.
        num_adaptive: k that decoding takes if it is told none; None is L.
        token_ids: rows of the vocabulary that become adaptive tokens in mode "full"; new rows are
            appended if it is empty.
        held_back: share of the prompts kept for evaluation, chosen by a hash of their ids.
        evaluated_positions: per held-back answer, behind which adaptive tokens are tried.
    """

    mode: str = "gated"
    window: int = 5
    diverse: bool = False
    rank: int = 16
    targets: tuple[str, ...] = ()
    loss: str = "improved"
    layout: str | None = None
    start_share: float = START_SHARE
    adaptive_weight: float = 1.0
    soft_weight: float = 0.0
    infilling: float = 0.0
    infilling_task: str = "code"
    num_adaptive: int | None = None
    token_ids: tuple[int, ...] = ()
    held_back: float = 0.03
    evaluated_positions: int = 16

    def __post_init__(self) -> None:
        for name, choices in {
            "mode": MODES,
            "loss": LOSSES,
            "layout": (*LAYOUTS, None),
        }.items():
            if getattr(self, name) not in choices:
                known = ", ".join(choice for choice in choices if choice)
                raise OptionError(f"{name}={getattr(self, name)!r}: choose one of {known}")
        for name in ("window", "rank", "evaluated_positions"):
            if type(getattr(self, name)) is not int or getattr(self, name) < 1:
                raise OptionError(f"{name}={getattr(self, name)!r} must be a whole number from 1")
        for name in ("start_share", "soft_weight", "infilling"):
            if not 0 <= getattr(self, name) <= 1:
                raise OptionError(f"{name}={getattr(self, name)!r} must lie between 0 and 1")
        if self.chosen_layout == "branches" and (self.loss == "basic" or not self.frozen):
            raise OptionError(
                f"layout='branches' keeps the text clean, which loss={self.loss!r} in mode "
                f"{self.mode!r} cannot use; choose layout='replaced'"
            )
        if self.token_ids and len(self.token_ids) != self.num_kinds:
            raise OptionError(
                f"token_ids={self.token_ids}: {self.num_kinds} adaptive tokens are needed"
            )

    @property
    def frozen(self) -> bool:
        """Whether the base keeps its weights and its output."""
        return self.mode in FROZEN_BASE

    @property
    def chosen_layout(self) -> str:
        """The layout, the default one if none was named."""
        usual = "branches" if self.frozen and self.loss == "improved" else "replaced"
        return self.layout or usual

    @property
    def num_kinds(self) -> int:
        """How many different adaptive tokens there are."""
        return self.window if self.diverse else 1


@dataclass(frozen=True)
class Text:
    """A text that is learned from.

    Attributes:
        tokens: prompt and answer.
        first: position of the answer's first token.
        fixed: tokens that are never replaced.
        top_tokens, top_probs: (answer tokens, K), the target's opinion; None if it is not known.
    """

    tokens: list[int]
    first: int
    fixed: frozenset[int] = frozenset()
    top_tokens: Tensor | None = None
    top_probs: Tensor | None = None

    @classmethod
    def of(cls, example: Example) -> Text:
        """Prompt and answer as they are."""
        response = example.response
        return cls(
            [*response.prompt, *response.response],
            len(response.prompt),
            frozenset(),
            example.top_tokens,
            example.top_probs,
        )

    def free(self) -> Tensor:
        """(n,) bool, positions that an adaptive token may take."""
        kept = [token in self.fixed for token in self.tokens] if self.fixed else None
        return free_positions(len(self.tokens), self.first, kept)


@dataclass(frozen=True)
class MicroBatch:
    """Examples of a pass, and the seed of every random number that they meet."""

    examples: list[Example]
    seed: int


def train_sdsat(
    model: PreTrainedModel,
    examples: Sequence[Example],
    folder: Path,
    settings: SdsatTrainSettings,
    run: TrainSettings,
    tokenizer: Any = None,
) -> SpecAdapter | None:
    """Train adaptive tokens and write their adapter, or the fine-tuned model, to `folder`.

    Args:
        model: the target. Frozen, but in mode "full" it is what learns, in place.
        examples: its answers; the target's opinions are read if `soft_weight` is not 0.
        folder: receives the result; checkpoint and metrics go into its `training` folder.
        settings: what is trained.
        run: how.
        tokenizer: of the target; needed for infilling, saved with a fine-tuned model.

    Returns:
        The adapter; None in mode "full".

    Raises:
        UnsupportedError: if the target changes its logits behind the head.
        OptionError: if nothing is left to train on or to evaluate with.
    """
    check_plain_head(model)
    learned, held = split_by_hash(examples, settings.held_back, lambda e: e.response.id)
    if not learned or not held:
        raise OptionError(f"{len(examples)} examples are too few to train and to hold some back")
    infilling = Infilling.of(tokenizer) if settings.infilling else None
    base = BaseModel.of(model)
    torch.manual_seed(run.seed)
    student = Student(model, settings, infilling)
    lengths = [len(e.response.prompt) + len(e.response.response) for e in learned]

    def epochs(epoch: int) -> list[MicroBatch]:
        batches = shuffled_batches(lengths, run.batch_tokens, run.seed, epoch)
        first = (run.seed * 1009 + epoch) * 1_000_003
        return [
            MicroBatch([learned[index] for index in batch], first + place)
            for place, batch in enumerate(batches)
        ]

    def evaluate() -> dict[str, float]:
        texts = [Text.of(example) for example in held]
        return agreement(student, texts, settings.window, settings.evaluated_positions)

    facts = {**asdict(settings), "examples": len(examples)}
    try:
        figures = train(
            student.parameters, student.loss, epochs, run, folder / "training", evaluate, facts
        )
    finally:
        student.release()
    options = {
        "num_adaptive": settings.num_adaptive or settings.window,
        "training": {**facts, **asdict(run)},
        "held_back": figures,
    }
    if settings.mode == "full":
        if PartialState().is_main_process:
            _save_model(model, student.token_ids, folder, settings, options, tokenizer)
        return None
    adapter = student.tokens.to_adapter(base, options)
    if PartialState().is_main_process:
        save_adapter(folder, adapter)
    return adapter


class Student:
    """What learns, and its losses.

    Args:
        model: the target.
        settings: what is trained.
        infilling: arranges code, if that is wanted.

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
            for parameter in self.parameters.values():
                parameter.data = parameter.data.float()
            table: Any = model.get_input_embeddings()
            self.tokens = AdaptiveTokens(shape, table.weight)
            return
        model.requires_grad_(False)
        embeddings = nn.Parameter(_mean_embedding(model).repeat(settings.num_kinds, 1))
        lora = {}
        if settings.mode != "embeddings":
            lora = new_lora(model, settings.rank, settings.targets)
        self.tokens = AdaptiveTokens(shape, embeddings, lora, everywhere=settings.mode == "lora")
        self.parameters = {"embeddings": embeddings}
        for name, (down, up) in lora.items():
            self.parameters |= {f"{name}.down": down, f"{name}.up": up}

    def release(self) -> None:
        """Let the model's weights need gradients as they did before."""
        for parameter, needed in self._needed:
            parameter.requires_grad_(needed)

    def loss(self, batch: MicroBatch) -> Loss:
        """Summed loss of a micro-batch, and the number of tokens that divides it."""
        generator = torch.Generator().manual_seed(batch.seed)
        texts = [self._text(example, generator) for example in batch.examples]
        if self.settings.chosen_layout == "branches":
            return self._branched(texts, generator)
        return self._replaced(texts, generator)

    def _text(self, example: Example, generator: torch.Generator) -> Text:
        arranged = (
            self.infilling is not None
            and example.response.task == self.settings.infilling_task
            and float(torch.rand((), generator=generator)) < self.settings.infilling
        )
        if not arranged:
            return Text.of(example)
        assert self.infilling is not None, "arranged"
        tokens = self.infilling.arrange(example.response.response, generator)
        # The code alone: its markers stand where a prompt would, and the target's opinions
        # belong to another order.
        return Text(tokens, 1, frozenset(self.infilling.markers))

    def _branched(self, texts: Sequence[Text], generator: torch.Generator) -> Loss:
        chains = []
        for text in texts:
            free = text.free()
            windows = draw_windows(free, self.settings.window, generator, self.settings.start_share)
            ends = [
                window_length(free, start, length)
                for start, length in zip(
                    windows.starts.tolist(), windows.lengths.tolist(), strict=True
                )
            ]
            chains.append(list(zip(windows.starts.tolist(), ends, strict=True)))
        if not any(length for mine in chains for _, length in mine):
            # Answers of a token or two have no place for a window.
            nothing = torch.stack([parameter.sum() for parameter in self.parameters.values()])
            return 0 * nothing.sum(), 0
        with torch.autocast(self.model.device.type, torch.bfloat16):
            logits, places = run_chains(self.model, self.tokens, texts, chains)
        total = self._cross_entropy(logits, texts, places)
        return total, len(places)

    def _replaced(self, texts: Sequence[Text], generator: torch.Generator) -> Loss:
        slots = []
        for text in texts:
            free = text.free()
            windows = draw_windows(free, self.settings.window, generator, self.settings.start_share)
            slots.append(windows.slots(free))
        everywhere = [(row, p) for row, text in enumerate(texts) for p in _answer_places(text)]
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
        self,
        texts: Sequence[Text],
        slots: Sequence[Tensor] | None,
        places: Sequence[tuple[int, int]],
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
        with torch.autocast(device.type, torch.bfloat16), self.tokens.active(self.model):
            if self.settings.mode == "full":
                hidden = self.model.base_model(input_ids=ids.to(device), use_cache=False)[0]
            else:
                with self.tokens.embedded(self.model, ids) as embeddings:
                    hidden = self.model.base_model(inputs_embeds=embeddings, use_cache=False)[0]
            head: Any = self.model.get_output_embeddings()
            return head(hidden[chosen[0], chosen[1]])

    def _ids(self, kinds: Tensor) -> Tensor:
        """Token ids of kinds of adaptive tokens, virtual ones but in mode "full"."""
        if not self.token_ids:
            return -1 - kinds
        return torch.tensor(self.token_ids)[kinds.clamp_min(0)]

    def _cross_entropy(
        self, logits: Tensor, texts: Sequence[Text], places: Sequence[tuple[int, int]]
    ) -> Tensor:
        """Summed over (text, position) places, each of which foretells the next position."""
        scores = logits.float().log_softmax(dim=-1)
        labels = torch.tensor([texts[row].tokens[p + 1] for row, p in places], dtype=torch.long)
        hard = -scores.gather(-1, labels.to(scores.device)[:, None])[:, 0]
        share = self.settings.soft_weight
        known = [i for i, (row, _) in enumerate(places) if texts[row].top_probs is not None]
        if not share or not known:
            return hard.sum()
        tops, chances = [], []
        for i in known:
            row, place = places[i]
            text = texts[row]
            assert text.top_tokens is not None, "known"
            assert text.top_probs is not None, "known"
            tops.append(text.top_tokens[place + 1 - text.first])
            chances.append(text.top_probs[place + 1 - text.first])
        probs = torch.stack(chances).to(scores)
        probs = probs / probs.sum(dim=-1, keepdim=True).clamp_min(1e-9)
        soft = -(probs * scores[known].gather(-1, torch.stack(tops).to(scores.device))).sum(dim=-1)
        weights = hard.new_ones(len(places))
        weights[known] = 1 - share
        return (weights * hard).sum() + share * soft.sum()


def run_chains(
    model: PreTrainedModel,
    tokens: AdaptiveTokens,
    texts: Sequence[Text],
    chains: Sequence[Sequence[tuple[int, int]]],
) -> tuple[Tensor, list[tuple[int, int]]]:
    """Run adaptive chains behind many prefixes of clean texts, as decoding does.

    The texts are run first and without gradients: their keys and values then lie where those of a
    chain of tree nodes would, so the adaptive tokens alone are run as a tree behind them.

    Args:
        model: the target.
        tokens: its adaptive tokens.
        texts: of any lengths.
        chains: per text (start, length): adaptive tokens at positions start to start + length - 1.

    Returns:
        (M, V) logits at the adaptive tokens, and the (text, position) of each.
    """
    runner = ModelRunner(model, len(texts), virtual_tokens=tokens)
    rows, sequences, nodes, places = [], [], [], []
    count = 0
    for index, (text, mine) in enumerate(zip(texts, chains, strict=True)):
        clean = text.tokens[text.first - 1 : -1]
        ids, parents = list(clean), list(range(-1, len(clean) - 1))
        for start, length in mine:
            above = start - text.first
            for place, token in enumerate(tokens.chain(length)):
                nodes.append(count + len(ids))
                places.append((index, start + place))
                ids.append(token)
                parents.append(above)
                above = len(ids) - 1
        rows.append((ids, parents))
        sequences.append(text.tokens[: text.first])
        count += len(ids)
    ends = DraftTree.from_rows([([text.tokens[-2]], [-1]) for text in texts])
    with runner.active():
        with torch.no_grad():
            runner.forward(ends, [text.tokens[:-1] for text in texts])
            runner.keep([[] for _ in texts])
        # From here on the answer counts as nodes that have run already.
        runner.stored = [text.first - 1 for text in texts]
        return runner.forward(DraftTree.from_rows(rows), sequences, nodes).logits, places


@torch.no_grad()
def agreement(
    student: Student, texts: Sequence[Text], length: int, num_positions: int
) -> dict[str, float]:
    """How often chains behind clean text foretell what the target said.

    Args:
        student: its model and adaptive tokens.
        texts: answers that were not learned from.
        length: of the chains.
        num_positions: per text, evenly spread; positions near the end have shorter chains.

    Returns:
        "slot_j", the share of right tokens at the j-th adaptive token; "slot_j_given", among those
        whose slots before it are right; "accepted", right tokens per chain before the first wrong
        one; "tokens_per_forward", 1 + accepted / 2, what the published loop gives of that.
    """
    tokens = student.tokens
    if student.token_ids:
        table: Any = student.model.get_input_embeddings()
        own = torch.tensor(student.token_ids, device=table.weight.device)
        tokens = AdaptiveTokens(tokens.shape, table(own))
    right: list[list[bool]] = []
    for begin in range(0, len(texts), EVALUATED):
        batch = texts[begin : begin + EVALUATED]
        chains = [_spread(text, length, num_positions) for text in batch]
        if not any(chains):
            continue
        logits, places = run_chains(student.model, tokens, batch, chains)
        found = iter(
            choice == batch[row].tokens[place + 1]
            for choice, (row, place) in zip(logits.argmax(dim=-1).tolist(), places, strict=True)
        )
        right += [[next(found) for _ in range(size)] for mine in chains for _, size in mine]
    figures: dict[str, float] = {}
    for slot in range(length):
        seen = [row for row in right if len(row) > slot]
        before = [row for row in seen if all(row[:slot])]
        figures[f"slot_{slot + 1}"] = _share([row[slot] for row in seen])
        figures[f"slot_{slot + 1}_given"] = _share([row[slot] for row in before])
    runs = [row.index(False) if False in row else len(row) for row in right]
    figures["accepted"] = sum(runs) / max(len(runs), 1)
    figures["tokens_per_forward"] = 1 + figures["accepted"] / 2
    return figures


def _spread(text: Text, length: int, count: int) -> list[tuple[int, int]]:
    free = text.free()
    places = free.nonzero()[:, 0]
    picked = torch.linspace(0, len(places) - 1, min(count, len(places))).round().long()
    return [(p, window_length(free, p, length)) for p in places[picked].tolist()]


def _answer_places(text: Text) -> range:
    """Positions whose next token is one of the answer."""
    return range(text.first - 1, len(text.tokens) - 1)


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / max(len(flags), 1)


@torch.no_grad()
def _mean_embedding(model: PreTrainedModel) -> Tensor:
    """(H,) float32: the mean of what the model's embedding says of its tokens."""
    table: Any = model.get_input_embeddings()
    ids = torch.arange(table.weight.shape[0], device=table.weight.device)
    return torch.stack([table(part).float().sum(dim=0) for part in ids.split(8192)]).sum(0) / len(
        ids
    )


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


def _save_model(
    model: PreTrainedModel,
    token_ids: Sequence[int],
    folder: Path,
    settings: SdsatTrainSettings,
    options: dict[str, Any],
    tokenizer: Any,
) -> None:
    """Write a fine-tuned model; its adaptive tokens are never generated, with or without SDSAT."""
    entry = {"token_ids": list(token_ids), "window": settings.window, **options}
    setattr(model.config, CONFIG_ENTRY, entry)
    generation: Any = model.generation_config
    suppressed = {*(generation.suppress_tokens or ()), *token_ids}
    generation.suppress_tokens = sorted(suppressed)
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
