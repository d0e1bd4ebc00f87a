"""Which prompts a training learns from, which it holds back, and figures on the latter.

`split_by_hash` looks at each prompt alone, so that a prompt keeps its side when others are added to
the list: what a list that still grows needs. `split_by_seed` hits its share exactly and leaves at
least one prompt on each side: what a short list needs, and no hash can promise. Neither replaces
the other, for an adapter's held-back prompts are those that its own function chose.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hf_spec.common.errors import OptionError
from hf_spec.training.answers import Example
from hf_spec.training.features import Text

Item = TypeVar("Item")
Answered = TypeVar("Answered", Text, Example)


def split_by_hash(
    items: Sequence[Item], share: float, name: Callable[[Item], str]
) -> tuple[list[Item], list[Item]]:
    """Items to learn from and, of about a `share` of the prompts, items held back.

    `name` is the id of an item's prompt. Either side may be empty.
    """
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        digest = hashlib.sha256(name(item).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(item)
    return sides


def learned_and_held(
    items: Sequence[Answered], share: float, kind: str
) -> tuple[list[Answered], list[Answered]]:
    """`split_by_hash` of answers by their prompts; `kind` says what they are.

    Raises:
        OptionError: if nothing is left to train on or to evaluate with.
    """
    learned, held = split_by_hash(items, share, lambda item: item.response.id)
    if not learned or not held:
        raise OptionError(f"{len(items)} {kind} are too few to train and to hold some back")
    return learned, held


def split_by_seed(ids: Sequence[str], share: float, seed: int) -> tuple[set[str], set[str]]:
    """Prompt ids to learn from and, a `share` rounded to a whole number, ids held back.

    There is at least one of each, whatever the order and number of `ids`; fewer than two are an
    `OptionError`.
    """
    known = sorted(set(ids))
    if len(known) < 2:
        raise OptionError(
            f"{len(known)} prompts with an answer are too few to learn from and to hold some back"
        )
    generator = torch.Generator().manual_seed(seed)
    shuffled = [known[place] for place in torch.randperm(len(known), generator=generator).tolist()]
    held = min(max(1, round(share * len(known))), len(known) - 1)
    return set(shuffled[held:]), set(shuffled[:held])


def by_slot(right: Sequence[Sequence[bool]], length: int | None = None) -> dict[str, float]:
    """How often each token of a draft of `length` (by default the longest there is) is right.

    Args:
        right: per draft whether its tokens are, in order; drafts may be cut short.
        length: of a whole draft.

    Returns:
        "slot_j", the share of right tokens among those at place j, from 1; "slot_j_given", among
        those whose tokens before it are right. 0 where there are none.
    """
    figures: dict[str, float] = {}
    for slot in range(max(map(len, right), default=0) if length is None else length):
        seen = [row for row in right if len(row) > slot]
        before = [row for row in seen if all(row[:slot])]
        for name, rows in (("", seen), ("_given", before)):
            share = sum(row[slot] for row in rows) / max(len(rows), 1)
            figures[f"slot_{slot + 1}{name}"] = share
    return figures


def tau(runs: Sequence[Sequence[int]]) -> float:
    """Accepted tokens a round of greedy drafts.

    `runs` has per answer and position how many tokens of a draft that begins there are accepted. A
    round keeps that many and adds one of the target's own.
    """
    rounds = accepted = 0
    for row in runs:
        place = 0
        while place < len(row):
            rounds, accepted = rounds + 1, accepted + row[place]
            place += row[place] + 1
    return accepted / max(rounds, 1)


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Acceptance by slot and tau of chains, by (drafts, length) bool per text: the right tokens.

    Returns:
        "slot_j", the share of drafts whose token j is right; "slot_j_given", among those whose
        tokens before it are; "tau", accepted tokens a round of greedy chains of that length;
        "alpha", the share of all tokens that were drafted (Gao et al. 2024, arXiv 2412.12639).
    """
    figures = by_slot([row for match in matches for row in match.tolist()])
    figures["tau"] = tau([match.long().cumprod(dim=1).sum(dim=1).tolist() for match in matches])
    # A round has one token of the target's own.
    figures["alpha"] = figures["tau"] / (figures["tau"] + 1)
    return figures
