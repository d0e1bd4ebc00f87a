"""Which positions of a text adaptive tokens take in training (SDSAT).

Two random processes (Liu et al. 2024, arXiv 2403.18647, section 2.2): a tenth of the positions are
drawn uniformly, and at each starts a window whose length is uniform on 1..L. Tokens in a window are
replaced by adaptive ones; the length of the text stays.

What the paper leaves open is settled so:

- Of n positions round(n / 10) are drawn, without replacement; at least one if there is any.
- Windows may overlap, and everything in any of them is replaced. Slots count from the newest
  start, so a merged run has slots such as 0, 1, 0, 1, 2 and never one beyond L - 1: identical
  tokens show no difference, diverse ones always begin with the first and follow each other.
- The token at position 0 has nothing before it, and nothing is foretold at the last one, so windows
  lie on 1..n - 2. Whoever calls says which of these are free: those of the answer, not of the
  prompt, and never infilling, begin- or end-of-sequence tokens. A window ends before what is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.training.choices import START_SHARE


@dataclass(frozen=True)
class Windows:
    """Windows of one text.

    Attributes:
        starts: (W,) int64, ascending positions.
        lengths: (W,) int64, 1..L, as drawn, whatever they meet.
    """

    starts: Tensor
    lengths: Tensor

    def slots(self, free: Tensor) -> Tensor:
        """(n,) int64: the slot, 0..L-1, of the adaptive token that replaces each token, or -1.

        Args:
            free: (n,) bool, which tokens may be replaced.
        """
        taken = torch.zeros_like(free)
        newest = torch.zeros(free.shape, dtype=torch.long)
        newest[self.starts] = self.starts
        for start, length in zip(self.starts.tolist(), self.lengths.tolist(), strict=True):
            taken[start : start + window_length(free, start, length)] = True
        slots = torch.arange(len(free)) - newest.cummax(dim=0).values
        return slots.masked_fill(~taken, -1)


def draw_windows(
    free: Tensor, window: int, generator: torch.Generator, share: float = START_SHARE
) -> Windows:
    """Draw starts among the free positions of a text, and their lengths.

    Args:
        free: (n,) bool, where a window may start.
        window: L.
        generator: on the CPU.
        share: of the free positions.
    """
    places = free.nonzero()[:, 0]
    count = min(len(places), max(1, round(share * len(places))))
    chosen = places[torch.randperm(len(places), generator=generator)[:count]]
    lengths = torch.randint(1, window + 1, (count,), generator=generator)
    return Windows(chosen.sort().values, lengths)


def free_positions(length: int, first: int, kept: Sequence[bool] | None = None) -> Tensor:
    """(length,) bool: positions that an adaptive token may take.

    Args:
        length: n of the text.
        first: position of the first token of the answer.
        kept: per token whether it must stay, for instance a special one; none by default.
    """
    free = torch.zeros(length, dtype=torch.bool)
    free[max(first, 1) : length - 1] = True
    if kept is not None:
        free &= ~torch.tensor(list(kept))
    return free


def window_length(free: Tensor, start: int, length: int) -> int:
    """How much of a window at `start` lies on free positions."""
    inside = free[start : start + length].tolist()
    return inside.index(False) if False in inside else len(inside)
