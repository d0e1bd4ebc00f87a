"""Choice of a published head's layout by its agreement with the target (`hf-spec check-head`).

A head that is loaded with a wrong layout raises no error; it only drafts worse. Configs leave some
options ambiguous (`hf_spec.evaluation.lossless.ambiguous_layouts`). For each of them, the value
whose first drafts agree most often with the target's own tokens is chosen. It replaces the config's
value only if the difference is larger than chance.
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
from hf_spec.evaluation.lossless.ambiguous_layouts import AMBIGUOUS_CONFIGS, States
from hf_spec.methods.loading import build_published

# Standard errors by which a layout must be better than that of the config.
BETTER_BY = 2.0

Overrides = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Agreement:
    """Agreement of a head's first drafts with the target under one layout.

    Attributes:
        config_overrides: (option, value) pairs that replace values of the config.
        agreed, compared: first drafts that equal the target's next token, and all first drafts.
        config: name of the config class that has these options.
    """

    config_overrides: Overrides
    agreed: int
    compared: int
    config: str = ""

    @property
    def share(self) -> float:
        """Share of first drafts that agree."""
        return self.agreed / max(self.compared, 1)

    @property
    def standard_error(self) -> float:
        """Standard error of `share`, at least that of one token."""
        count = max(self.compared, 1)
        return max(math.sqrt(self.share * (1 - self.share) / count), 1 / count)


@dataclass(frozen=True)
class Texts:
    """Token ids of texts, and the positions at which the target's answers begin."""

    tokens: list[list[int]]
    begins: list[int]


@torch.no_grad()
def target_answers(target: Any, prompts: Sequence[Tensor], num_tokens: int) -> Texts:
    """Return plain greedy outputs for (1, L) prompts, at least `num_tokens` tokens in all."""
    each = -(-num_tokens // len(prompts))
    texts = Texts([], [])
    for prompt in prompts:
        ids = prompt.to(target.device)
        options = {"max_new_tokens": each, "do_sample": False, "num_beams": 1}
        output = target.generate(ids, attention_mask=torch.ones_like(ids), **options)
        texts.tokens.append(output[0].tolist())
        texts.begins.append(prompt.shape[1])
    return texts


def read_ambiguous_head(name: str) -> PublishedHead:
    """Read a published head from a folder or repository.

    Raises:
        AssistantError: if it is not a published head, or its family has no ambiguous options.
    """
    published = read_published(name)
    if published is None or published.family not in AMBIGUOUS_CONFIGS:
        what = "not a published head" if published is None else f"a {published.family!r} head"
        families = ", ".join(AMBIGUOUS_CONFIGS)
        raise AssistantError(
            f"{name!r} is {what}; only heads of these families have an ambiguous layout: {families}"
        )
    return published


def choose_layout(
    published: PublishedHead,
    target: PreTrainedModel,
    texts: Texts,
    report: Callable[[Agreement], None],
) -> Agreement:
    """Try the layouts of a head (from `read_ambiguous_head`) and return the best one.

    `report` is called with each agreement, first with that of the unchanged config.

    Raises:
        AssistantError: if the head does not fit the target.
    """
    family = AMBIGUOUS_CONFIGS[published.family]
    states = _all_states(target, texts)

    @torch.no_grad()
    def measure(overrides: Overrides) -> Agreement:
        head = build_published(replace(published, overrides=overrides), target)
        agreed = compared = 0
        for tokens, begin, text_states in zip(texts.tokens, texts.begins, states, strict=True):
            # The draft after position p predicts token p + 1.
            starts = range(max(begin - 1, 1), len(tokens) - 1)
            agreed += family.num_agreed(head, tokens, text_states, starts)
            compared += len(starts)
        return Agreement(overrides, agreed, compared, family.config)

    best = measure(())
    report(best)
    for alternatives in family.alternatives(build_published(published, target), target):
        tried = []
        for override in alternatives:
            try:
                tried.append(measure((*best.config_overrides, override)))
            except AssistantError:
                # Its tensors do not have this layout.
                continue
            report(tried[-1])
        winner = max(tried, key=lambda agreement: agreement.agreed, default=best)
        if winner.share > best.share + BETTER_BY * best.standard_error:
            best = winner
    return best


@torch.no_grad()
def _all_states(target: PreTrainedModel, texts: Texts) -> list[States]:
    """Return per text the (T, H) states of every layer index, and those before the norm."""
    all_states: list[States] = []
    last = LastLayer(target)
    with last.watched():
        for tokens in texts.tokens:
            ids = torch.tensor([tokens], device=target.device)
            hidden = target(ids, output_hidden_states=True, use_cache=False).hidden_states
            states = {index: state[0] for index, state in enumerate(hidden)}
            all_states.append({**states, -1: hidden[-1][0], BEFORE_NORM: last.take()[0]})
    return all_states
