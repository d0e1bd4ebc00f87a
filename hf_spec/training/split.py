"""Which prompts a training learns from and which it holds back, never both.

`split_by_hash` asks of each prompt alone, so that a prompt keeps its side when others are added to
the list: what a list that still grows needs. `split_by_seed` hits its share exactly and leaves at
least one prompt on each side: what a short list needs, and no hash can promise. Neither replaces
the other, for an adapter's held-back prompts are those that its own function chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import torch

from hf_spec.errors import OptionError
from hf_spec.training.responses import Response

Item = TypeVar("Item")


class HasResponse(Protocol):
    """An answer of the target, whatever else is known of it."""

    @property
    def response(self) -> Response:
        """Prompt and answer."""


Answered = TypeVar("Answered", bound=HasResponse)


def split_by_hash(
    items: Sequence[Item], share: float, name: Callable[[Item], str]
) -> tuple[list[Item], list[Item]]:
    """Items to learn from and items held back, about `share` of them; either may be empty.

    Args:
        items: in any number per prompt.
        share: of the prompts, between 0 and 1.
        name: the id of an item's prompt.
    """
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        digest = hashlib.sha256(name(item).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(item)
    return sides


def learned_and_held(
    items: Sequence[Answered], share: float, kind: str
) -> tuple[list[Answered], list[Answered]]:
    """`split_by_hash` of answers by their prompts, neither side empty.

    Args:
        items: each with a `response`.
        share: of the prompts to hold back.
        kind: what the items are, for the message.

    Raises:
        OptionError: if nothing is left to train on or to evaluate with.
    """
    learned, held = split_by_hash(items, share, lambda item: item.response.id)
    if not learned or not held:
        raise OptionError(f"{len(items)} {kind} are too few to train and to hold some back")
    return learned, held


def split_by_seed(ids: Sequence[str], share: float, seed: int) -> tuple[set[str], set[str]]:
    """Prompt ids to learn from and ids held back; at least one each.

    Args:
        ids: of prompts, in any order and number.
        share: of the different ones, rounded to a whole number.
        seed: of the choice.

    Raises:
        OptionError: for fewer than two prompts.
    """
    known = sorted(set(ids))
    if len(known) < 2:
        raise OptionError(
            f"{len(known)} prompts with an answer are too few to learn from and to hold some back"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(known), generator=generator).tolist()
    held = min(max(1, round(share * len(known))), len(known) - 1)
    shuffled = [known[place] for place in order]
    return set(shuffled[held:]), set(shuffled[:held])
