"""Random draws that do not hold the host up."""

from __future__ import annotations

import torch
from torch import Tensor


def draw(probs: Tensor, count: int = 1) -> Tensor:
    """Draw without replacement, as `torch.multinomial` does.

    That function asks a GPU whether its input is sane, and waits for the answer. There the first
    of exponential clocks to ring are taken, which have the same distribution, order included.

    Args:
        probs: (M, V) float32 probabilities.
        count: how many per line.

    Returns:
        (M, count) int64.
    """
    if probs.device.type == "cpu":
        return torch.multinomial(probs, count)
    return first_to_ring(probs, count)


def first_to_ring(rates: Tensor, count: int) -> Tensor:
    """Which of the clocks of each line ring first, the rates being anything but negative."""
    return (rates / torch.empty_like(rates).exponential_()).topk(count, dim=-1).indices
