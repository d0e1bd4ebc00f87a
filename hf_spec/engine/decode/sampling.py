"""Distributions of tokens, and random draws from them that do not hold the host up."""

from __future__ import annotations

import torch
from torch import Tensor


def distribution(scores: Tensor) -> Tensor:
    """What a drafter proposes by: the softmax of (M, V) scores, whatever stands in them.

    A processor may leave scores of which the softmax is not a number: an infinite one, -inf for
    every token, NaN. There the token that `argmax` takes, as plain greedy decoding does, is
    certain.
    """
    probs = scores.softmax(dim=-1)
    # One such score makes its whole line NaN.
    undefined = probs[:, :1].isnan()
    # A GPU is not asked, because the host would wait for the answer.
    if probs.device.type == "cpu" and not undefined.any():
        return probs
    best = scores.argmax(dim=-1, keepdim=True)
    return probs.masked_fill(undefined, 0.0).scatter_add_(-1, best, undefined.to(probs.dtype))


def draw(probs: Tensor, count: int = 1) -> Tensor:
    """(M, count) int64: draws without replacement from (M, V) lines, as by `torch.multinomial`.

    That function asks a GPU whether its input is sane, and waits for the answer. There the first of
    exponential clocks to ring are taken, which have the same distribution, order included.
    """
    if probs.device.type == "cpu":
        return torch.multinomial(probs, count)
    return first_to_ring(probs, count)


def draw_or_none(probs: Tensor) -> Tensor:
    """Draw one token per line of (M, V) `probs`: (M,) int64, -1 where the line has NaN.

    A softmax over scores with NaN, an infinite score or only -inf is NaN throughout.
    """
    undefined = probs[:, 0].isnan()
    # A GPU is not asked, because the host would wait for the answer.
    if probs.device.type == "cpu" and not undefined.any():
        return draw(probs)[:, 0]
    drawn = draw(probs.masked_fill(undefined[:, None], 1.0))[:, 0]
    return drawn.masked_fill(undefined, -1)


def first_to_ring(rates: Tensor, count: int) -> Tensor:
    """Which of the clocks of each line ring first, the rates being anything but negative."""
    return (rates / torch.empty_like(rates).exponential_()).topk(count, dim=-1).indices
