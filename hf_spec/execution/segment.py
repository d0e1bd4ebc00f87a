"""What a stretch of packed tokens may look back on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class Segment:
    """Consecutive packed tokens of one row that share what they may look back on.

    Attributes:
        slot: the row's slot in the pool.
        start, end: place of the tokens in the packed sequence.
        num_keys: how many positions of the slot the tokens look at.
        position: (end - start,) int64, the true position of each token.
        last_position: the largest of them, known without asking the device.
        key_position: (num_keys,) int64, the true position of each key; differs from the storage
            index where the branches of a tree lie one after the other.
        visible: (end - start, num_keys) bool, or None when every key is visible.
        prefix: how many first keys every token sees, at consecutive positions; fewer is allowed
            and costs the kernel time only.
    """

    slot: int
    start: int
    end: int
    num_keys: int
    position: Tensor
    last_position: int
    key_position: Tensor
    visible: Tensor | None
    prefix: int = 0
    _masks: dict[object, Tensor | None] = field(default_factory=dict)

    def moved(self, slot: int, start: int) -> Segment:
        """The same view for the tokens of another row, which begin at `start`."""
        return replace(self, slot=slot, start=start, end=start + self.end - self.start)

    @property
    def view(self) -> object:
        """Equal for segments that were `moved` from one: they look at equal places."""
        return id(self._masks)

    def mask(self, window: int | None, groups: int, like: Tensor) -> Tensor | None:
        """Additive mask (groups * T, num_keys) in the dtype and on the device of `like`.

        Query heads that share a key head are folded into rows, so the mask repeats `groups` times.
        Computed once per step and kind of layer.
        """
        key = (window, groups, like.dtype, like.device)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, groups, like)
        return self._masks[key]

    def _build_mask(self, window: int | None, groups: int, like: Tensor) -> Tensor | None:
        visible = self.visible
        # A window that reaches back to the first key for every query hides nothing.
        if window is not None and self.last_position >= window:
            inside = self.key_position[None, :] > self.position[:, None] - window
            visible = inside if visible is None else visible & inside
        if visible is None:
            return None
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf")).to(like.device).repeat(groups, 1)
