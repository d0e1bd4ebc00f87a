"""Texts as heads of pairs read them in training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.training.features import LAST, Text, text_features
from hf_spec.training.responses import Response


@dataclass(frozen=True)
class Pairs:
    """Texts as a head reads them, padded on the right, with the M positions it learns from.

    Output i predicts pair i + k, so the true feature and token of position i are those of pair
    i + k. Padding has no effect: the answer of a learned position comes after its whole block.

    Attributes:
        tokens: (B, T) int64, t_{i+1}.
        features: (B, T, n * H) in the stored dtype, h_i of n layers.
        span: per text the first learned position and the end of the last.
    """

    tokens: Tensor
    features: Tensor
    span: list[tuple[int, int]]

    @property
    def counts(self) -> list[int]:
        """Number of learned positions of each text."""
        return [stop - first for first, stop in self.span]

    @cached_property
    def rows(self) -> Tensor:
        """(M,) int64 text of each learned position, text by text."""
        rows = torch.arange(len(self.span)).repeat_interleave(torch.tensor(self.counts))
        return rows.to(self.tokens.device)

    @cached_property
    def positions(self) -> Tensor:
        """(M,) int64 learned positions."""
        positions = torch.cat([torch.arange(first, stop) for first, stop in self.span])
        return positions.to(self.tokens.device)

    def has_level(self, level: int) -> Tensor:
        """Return (M,) bool: positions whose text goes on `level` tokens behind the answer."""
        stops = torch.tensor([stop for _, stop in self.span], device=self.tokens.device)
        return self.positions + level < stops[self.rows]


def cut_prompt(response: Response, max_context: int | None) -> int:
    """Return the number of prompt tokens to skip, so that at most `max_context` remain."""
    return 0 if max_context is None else max(0, len(response.prompt) - max_context)


def read_pairs(
    target: PreTrainedModel,
    texts: Sequence[Text],
    block_size: int,
    max_context: int | None = None,
    layers: Sequence[int] = LAST,
    learn_prompts: bool = False,
) -> Pairs:
    """Return texts as one batch; a learned position is one whose token t_{i+k+1} is of the answer.

    At most `max_context` tokens of a prompt are read, and learned with `learn_prompts`. `target`
    computes missing features, from the states of `layers`; `block_size` is k.
    """
    stored = [text.features for text in texts]
    if any(features is None for features in stored):
        stored = list(text_features(target, [text.response for text in texts], layers))
    lines, states, span = [], [], []
    for text, features in zip(texts, stored, strict=True):
        response = text.response
        cut = cut_prompt(response, max_context)
        line = [*response.prompt, *response.response][cut + 1 :]
        answered = max(0, len(response.prompt) - cut - 1 - block_size)
        first = 0 if learn_prompts else answered
        lines.append(torch.tensor(line))
        assert features is not None
        states.append(features[cut:])
        span.append((first, max(first, len(line) - block_size)))
    tokens, inputs = (
        nn.utils.rnn.pad_sequence(parts, batch_first=True).to(target.device)
        for parts in (lines, states)
    )
    return Pairs(tokens, inputs, span)
