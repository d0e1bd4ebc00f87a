"""Which reading of a published head fits: how often its first draft is the target's next token.

A head that is read wrongly never fails, it only drafts worse, and configs leave some of it open.
Each question (layers, rotary base, embedding, norms) is answered by the reading whose first drafts
agree most often with what the target itself said; another one than the config's has to be better
by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.errors import AssistantError
from hf_spec.execution.last_layer import BEFORE_NORM, LastLayer
from hf_spec.heads.eagle_head import FAMILIES, EagleHead
from hf_spec.heads.eagle_spec import THETA, default_aux_layers
from hf_spec.models.falcon_ranks import ranks_along
from hf_spec.strategies.assistants import build_published

# Standard errors by which a reading must be better than that of the config.
BETTER_BY = 2.0

Changes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Agreement:
    """How a head fares under one reading.

    Attributes:
        changes: what is read against the config, (option of `EagleConfig`, value) pairs.
        agreed, compared: first drafts that were the target's own next token, of how many.
    """

    changes: Changes
    agreed: int
    compared: int

    @property
    def share(self) -> float:
        """Of first drafts that agreed."""
        return self.agreed / max(self.compared, 1)


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, and where in each the target's own answer begins."""

    tokens: list[list[int]]
    begins: list[int]


@torch.no_grad()
def own_answers(target: PreTrainedModel, prompts: Sequence[Tensor], num_tokens: int) -> Texts:
    """Greedy answers of plain `generate()` to (1, L) prompts, `num_tokens` in all or more."""
    each = -(-num_tokens // len(prompts))
    texts = Texts([], [])
    for prompt in prompts:
        ids = prompt.to(target.device)
        options: Any = {"max_new_tokens": each, "do_sample": False, "num_beams": 1}
        model: Any = target
        output = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.tokens.append(output[0].tolist())
        texts.begins.append(prompt.shape[1])
    return texts


def check_readings(
    name: str, target: PreTrainedModel, texts: Texts, tell: Callable[[Agreement], None]
) -> Agreement:
    """Try the readings of the EAGLE head `name` that its config leaves open; the one that fits.

    `tell` is called with each agreement, that of the config's own reading first.

    Raises:
        AssistantError: if it is no such head, or does not fit the target.
    """
    published = read_published(name)
    if published is None or published.family not in FAMILIES:
        what = "no published head" if published is None else f"one of {published.family!r}"
        raise AssistantError(f"{name!r} is {what}; readings are open in EAGLE heads alone")
    states = _all_states(target, texts)
    best = _measured(published, (), target, texts, states)
    tell(best)
    for question in _questions(published, target):
        tried = []
        for change in question:
            changes = (*best.changes, change)
            try:
                tried.append(_measured(published, changes, target, texts, states))
            except AssistantError:
                # A reading that its tensors cannot have.
                continue
            tell(tried[-1])
        winner = max(tried, key=lambda one: one.agreed, default=best)
        if winner.share > best.share + BETTER_BY * _error(best):
            best = winner
    return best


def _error(found: Agreement) -> float:
    """The standard error of a share, at least that of one token."""
    share, count = found.share, max(found.compared, 1)
    return max(math.sqrt(share * (1 - share) / count), 1 / count)


def _questions(head: PublishedHead, target: PreTrainedModel) -> Iterator[list[tuple[str, Any]]]:
    """What configs leave open, and the answers that are tried beside the config's own."""
    text: Any = target.config.get_text_config()
    own = _own_reading(head, target)
    if head.family != "eagle":
        count, depth = len(own.layers), text.num_hidden_layers
        usual = default_aux_layers(depth)
        shifted = [tuple(i + step for i in own.layers) for step in (1, -1)]
        ways = [*shifted, *([usual] if len(usual) == count else [])]
        fit = [way for way in dict.fromkeys(ways) if all(0 <= i <= depth for i in way)]
        yield [("aux_layers", way) for way in fit if way != own.layers]
    rope = getattr(text, "rope_parameters", None) or {}
    thetas = {THETA, float(rope.get("rope_theta") or THETA)} - {own.theta}
    yield [("rope_theta", theta) for theta in sorted(thetas)]
    yield [("embedding", way) for way in ("target", "own", "scaled") if way != own.embedding]
    if head.family != "eagle":
        yield [("norm_before_residual", not own.norm_before_residual)]
        # Whether the feature that is handed on is normed shows in later drafts alone.


@dataclass(frozen=True)
class _OwnReading:
    layers: tuple[int, ...]
    theta: float
    embedding: str
    norm_before_residual: bool


def _own_reading(head: PublishedHead, target: PreTrainedModel) -> _OwnReading:
    spec = _built(head, (), target).spec
    depth = target.config.get_text_config().num_hidden_layers
    layers = tuple(depth if i == BEFORE_NORM else i for i in spec.hidden_layers)
    theta = float(spec.rope["rope_theta"])
    return _OwnReading(layers, theta, spec.embedding, spec.norm_before_residual)


def _built(head: PublishedHead, changes: Changes, target: PreTrainedModel) -> EagleHead:
    found: EagleHead = build_published(replace(head, reading=changes), target)
    return found


@torch.no_grad()
def _all_states(target: PreTrainedModel, texts: Texts) -> list[dict[int, Tensor]]:
    """Per text the (T, H) states of every index, and those before the norm."""
    found = []
    last = LastLayer(target)
    with last.watched():
        for tokens in texts.tokens:
            ids = torch.tensor([tokens], device=target.device)
            states = target(ids, output_hidden_states=True, use_cache=False).hidden_states
            mine = {index: state[0] for index, state in enumerate(states)}
            found.append({**mine, -1: states[-1][0], BEFORE_NORM: last.take()[0]})
    return found


@torch.no_grad()
def _measured(
    published: PublishedHead,
    changes: Changes,
    target: PreTrainedModel,
    texts: Texts,
    states: Sequence[dict[int, Tensor]],
) -> Agreement:
    head = _built(published, changes, target)
    agreed = compared = 0
    for tokens, begin, mine in zip(texts.tokens, texts.begins, states, strict=True):
        features = head.fuse([mine[layer][:-1] for layer in head.hidden_layers])
        # A draft from place p is the guess at token p + 1.
        starts = range(max(begin - 1, 1), len(tokens) - 1)
        ranks = ranks_along(head, tokens, features, list(starts), 1)
        agreed += int((ranks == 0).sum())
        compared += len(starts)
    return Agreement(changes, agreed, compared)
