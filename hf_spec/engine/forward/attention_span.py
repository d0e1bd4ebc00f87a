"""Segments: which keys the packed tokens of one row attend to, and where their own are stored.

A list of segments describes one attention step completely. `step.PackedStep` derives from it what
each backend reads: groups of equal rows for SDPA, flat tensors for the kernels.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

# Longest chain, in tokens, that attends like a draft tree.
STEP_TOKENS = 512


@dataclass
class Segment:
    """Consecutive packed tokens of one row that attend to the same slot of the pool.

    The visible text before a draft may be long, so it is given by its length alone (`prefix`).

    Attributes:
        start, end: range of the tokens in the packed sequence.
        num_keys: number of leading entries of the slot that the tokens attend to.
        position: (end - start,) int64, position of each token in its text.
        last_position: largest of them, as a number on the host.
        tail_position: (num_keys - prefix,) int64, position of each key after the prefix. Differs
            from the index in the slot where branches of a tree are stored one after the other.
        seen: (end - start, num_keys - prefix) bool, keys after the prefix that each token attends
            to; None if it attends to all of them and their positions are consecutive.
        prefix: number of leading keys, at consecutive positions, that every token attends to. A
            smaller number gives the same result more slowly.
        first_position: position of the first key.
        cache_indices: index in the slot where each token is stored; empty if none is stored.
        is_chain: True if the tokens are the last keys, and each attends to all keys up to its own.
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
    cache_indices: Sequence[int] = ()
    is_chain: bool = False
    _masks: dict[object, Tensor | None] = field(default_factory=dict)
    _blocks: dict[object, tuple[int, Tensor]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the segment."""
        return self.end - self.start

    @property
    def is_prompt(self) -> bool:
        """True for a chain that is too long for the attention of steps."""
        return self.is_chain and self.num_tokens > STEP_TOKENS

    def moved(self, slot: int, start: int) -> Segment:
        """Return the same segment for an equal row in another slot, from token `start` on."""
        segment = copy.copy(self)
        segment.slot, segment.start, segment.end = slot, start, start + self.num_tokens
        return segment

    @cached_property
    def key_position(self) -> Tensor:
        """(num_keys,) int64, position of each key."""
        before = torch.arange(self.first_position, self.first_position + self.prefix)
        return torch.cat([before, self.tail_position])

    @cached_property
    def visible(self) -> Tensor | None:
        """(end - start, num_keys) bool, or None when every key is visible."""
        if self.seen is None:
            return None
        return F.pad(self.seen, (self.prefix, 0), value=True)

    @property
    def shape_key(self) -> object:
        """Equal for segments that were `moved` from one: they differ in slot and start only."""
        return id(self._masks)

    def mask(
        self, window: int | None, groups: int, like: Tensor, chunk: int | None = None
    ) -> Tensor | None:
        """Return the additive mask (groups * T, num_keys) in the dtype and device of `like`.

        It is computed once per step and kind of layer, and shared by equal rows. `groups` query
        heads of one key head are folded into rows. A token attends to the last `window` positions,
        its own included, or within its own chunk of `chunk` positions.
        """
        key = (window, chunk, groups, like.dtype, like.device)
        if key not in self._masks:
            self._masks[key] = self._build_mask(window, chunk, groups, like)
        return self._masks[key]

    def block_mask(
        self, first: int, window: int | None, like: Tensor, chunk: int | None = None
    ) -> tuple[int, Tensor]:
        """Return the first key that a part of a chain attends to, and the mask from there on.

        `like` are (1, H, T, D) queries of the T tokens from position `first` on. The additive mask
        is (T, S), up to the key of the last token, and computed once like that of `mask`.
        """
        key = (window, chunk, first, like.dtype, like.device)
        if key not in self._blocks:
            position = torch.arange(first, first + like.shape[2])[:, None]
            earliest = _first_visible(position, window, chunk).clamp(min=0)
            begin = int(earliest[0])
            key_position = torch.arange(begin, first + len(position), device=like.device)
            visible = key_position <= position.to(like.device)
            visible &= key_position >= earliest.to(like.device)
            self._blocks[key] = begin, _additive_mask(visible, like.dtype)
        return self._blocks[key]

    def _build_mask(
        self, window: int | None, chunk: int | None, groups: int, like: Tensor
    ) -> Tensor | None:
        visible = self.visible
        # A limit beyond the last position hides no key.
        limit = chunk or window
        if limit is not None and self.last_position >= limit:
            first = _first_visible(self.position[:, None], window, chunk)
            inside = self.key_position[None, :] >= first
            visible = inside if visible is None else visible & inside
        if visible is None:
            return None
        return _additive_mask(visible, like.dtype).to(like.device).repeat(groups, 1)


def _first_visible(position: Tensor, window: int | None, chunk: int | None) -> Tensor:
    """Return the first position that tokens at `position` attend to; it may be negative."""
    if chunk:
        return position - position % chunk
    return position - window + 1 if window else torch.zeros_like(position)


def _additive_mask(visible: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what is added to scores: 0 where a key is visible, -inf elsewhere."""
    mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
    return mask.masked_fill_(~visible, float("-inf"))


def span(indices: Sequence[int]) -> slice | Tensor:
    """Return ascending indices as a slice if they are consecutive, which avoids a gather."""
    if indices[-1] - indices[0] + 1 == len(indices):
        return slice(indices[0], indices[-1] + 1)
    return torch.tensor(indices)
