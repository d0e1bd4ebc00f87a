"""What learns when adaptive tokens are trained, and its losses.

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
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.errors import OptionError
from hf_spec.models.adaptive_tokens import AdaptiveShape, AdaptiveTokens
from hf_spec.models.gated_lora import new_lora
from hf_spec.training.choices import LAYOUTS, LOSSES, MODES, START_SHARE
from hf_spec.training.infilling import Infilling
from hf_spec.training.sdsat_chains import Text, run_chains
from hf_spec.training.teacher import Example
from hf_spec.training.trainer import Loss, MicroBatch
from hf_spec.training.windows import draw_windows, window_length

FROZEN_BASE = ("gated", "embeddings")


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


def _answer_places(text: Text) -> range:
    """Positions whose next token is one of the answer."""
    return range(text.first - 1, len(text.tokens) - 1)


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
