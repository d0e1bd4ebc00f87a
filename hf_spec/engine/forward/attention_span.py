"""What a stretch of packed tokens may look back on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass
class Segment:
    """Consecutive packed tokens of one row that share what they may look back on.

    What is the same for all of them, a text that may be long, is told by its length alone.

    Attributes:
        slot: the row's slot in the pool.
        start, end: place of the tokens in the packed sequence.
        num_keys: how many positions of the slot the tokens look at.
        position: (end - start,) int64, the true position of each token.
        last_position: the largest of them, known without asking the device.
        tail_position: (num_keys - prefix,) int64, the true position of each key after the prefix;
            differs from the storage index where the branches of a tree lie one after the other.
        seen: (end - start, num_keys - prefix) bool, which of these each token sees, or None when
            every key is visible and all their positions are consecutive.
        prefix: how many first keys every token sees, at consecutive positions; fewer is allowed
            and costs time only.
        first_position: the true position of the first key.
    """

    slot: int
    start: int
    end: int
    num_keys: int
    position: Tensor
    last_position: int
    tail_position: Tensor
    seen: Tensor | None
    prefix: int = 0
    first_position: int = 0
    _masks: dict[object, Tensor | None] = field(default_factory=dict)

    def moved(self, slot: int, start: int) -> Segment:
        """The same view for the tokens of another row, which begin at `start`."""
        return replace(self, slot=slot, start=start, end=start + self.end - self.start)

    @cached_property
    def key_position(self) -> Tensor:
        """(num_keys,) int64, the true position of each key."""
        before = torch.arange(self.first_position, self.first_position + self.prefix)
        return torch.cat([before, self.tail_position])

    @cached_property
    def visible(self) -> Tensor | None:
        """(end - start, num_keys) bool, or None when every key is visible."""
        if self.seen is None:
            return None
        return F.pad(self.seen, (self.prefix, 0), value=True)

    @property
    def view(self) -> object:
        """Equal for segments that were `moved` from one: they look at equal places."""
        return id(self._masks)

    def mask(
        self, window: int | None, groups: int, like: Tensor, chunk: int | None = None
    ) -> Tensor | None:
        """Additive mask (groups * T, num_keys) in the dtype and on the device of `like`.

        Query heads that share a key head are folded into rows, so the mask repeats `groups` times.
        Computed once per step and kind of layer. A token sees the last `window` positions, itself
        included, or those of its own `chunk` of so many.
        """
        key = (window, chunk, groups, like.dtype, like.device)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, chunk, groups, like)
        return self._masks[key]

    def _build_mask(
        self, window: int | None, chunk: int | None, groups: int, like: Tensor
    ) -> Tensor | None:
        visible = self.visible
        # What reaches back to the first key for every query hides nothing.
        limit = chunk or window
        if limit is not None and self.last_position >= limit:
            position = self.position[:, None]
            first = position - position % chunk if chunk else position - limit + 1
            inside = self.key_position[None, :] >= first
            visible = inside if visible is None else visible & inside
        if visible is None:
            return None
        mask = torch.zeros(visible.shape, dtype=like.dtype, device=visible.device)
        return mask.masked_fill_(~visible, float("-inf")).to(like.device).repeat(groups, 1)
