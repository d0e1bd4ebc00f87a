"""Which reading of a published head fits: how often its first draft is the target's next token.

A head that is read wrongly never fails, it only drafts worse, and configs leave some of it open.
Each question of its family (`hf_spec.evaluation.lossless.ambiguous_layouts`) is answered by the
reading whose first drafts agree most often with what the target itself said; another one than the
config's has to be better by more than chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.published import PublishedHead, read_published
from hf_spec.common.errors import AssistantError
from hf_spec.engine.forward.last_layer import BEFORE_NORM, LastLayer
from hf_spec.evaluation.lossless.ambiguous_layouts import OPEN_READINGS, OpenReadings, States
from hf_spec.methods.loading import build_published

# Standard errors by which a reading must be better than that of the config.
BETTER_BY = 2.0

Changes = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Agreement:
    """How a head fares under one reading.

    Attributes:
        changes: what is read against the config, (option of its strategy, value) pairs.
        agreed, compared: first drafts that were the target's own next token, of how many.
        config: name of the class whose options these are.
    """

    changes: Changes
    agreed: int
    compared: int
    config: str = ""

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


def read_head(name: str) -> PublishedHead:
    """The head in a folder or repository; `AssistantError` if its family has no open readings."""
    published = read_published(name)
    if published is None or published.family not in OPEN_READINGS:
        what = "no published head" if published is None else f"one of {published.family!r}"
        families = ", ".join(OPEN_READINGS)
        raise AssistantError(f"{name!r} is {what}; readings are open in heads of {families}")
    return published


def check_readings(
    published: PublishedHead,
    target: PreTrainedModel,
    texts: Texts,
    tell: Callable[[Agreement], None],
) -> Agreement:
    """Try the readings of a head (of `read_head`) that its config leaves open; the one that fits.

    `tell` is called with each agreement, that of the config's own reading first.

    Raises:
        AssistantError: if the head does not fit the target.
    """
    family = OPEN_READINGS[published.family]
    states = _all_states(target, texts)

    def measured(changes: Changes) -> Agreement:
        head = build_published(replace(published, overrides=changes), target)
        return _measured(family, head, changes, texts, states)

    best = measured(())
    tell(best)
    own = build_published(published, target)
    for question in family.questions(own, target):
        tried = []
        for change in question:
            try:
                tried.append(measured((*best.changes, change)))
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


@torch.no_grad()
def _all_states(target: PreTrainedModel, texts: Texts) -> list[States]:
    """Per text the (T, H) states of every index, and those before the norm."""
    found: list[States] = []
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
    family: OpenReadings, head: Any, changes: Changes, texts: Texts, states: Sequence[States]
) -> Agreement:
    agreed = compared = 0
    for tokens, begin, mine in zip(texts.tokens, texts.begins, states, strict=True):
        # A draft from place p is the guess at token p + 1.
        starts = range(max(begin - 1, 1), len(tokens) - 1)
        agreed += family.agreed(head, tokens, mine, starts)
        compared += len(starts)
    return Agreement(changes, agreed, compared, family.config)
