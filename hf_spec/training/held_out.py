"""Training set and held-out set of prompts, and figures on the latter.

`split_by_hash` decides for each prompt alone, so a prompt keeps its side when others are added to
the list. `split_by_seed` hits its share exactly and leaves at least one prompt on each side, which
short lists need. An adapter's held-out prompts are those that its own function chose.
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
    """Return the items to train on and the held-out ones, about a `share` of the prompts.

    `name` returns the id of an item's prompt. Either side may be empty.
    """
    sides: tuple[list[Item], list[Item]] = ([], [])
    for item in items:
        digest = hashlib.sha256(name(item).encode()).digest()
        sides[int.from_bytes(digest[:8], "big") < share * 2**64].append(item)
    return sides


def learned_and_held(
    items: Sequence[Answered], share: float, kind: str
) -> tuple[list[Answered], list[Answered]]:
    """Return `split_by_hash` of answers by their prompts; `kind` names the items in messages.

    Raises `OptionError` if nothing is left to train on or to evaluate with.
    """
    learned, held = split_by_hash(items, share, lambda item: item.response.id)
    if not learned or not held:
        raise OptionError(f"{len(items)} {kind} are too few for a training set and a held-out set")
    return learned, held


def split_by_seed(ids: Sequence[str], share: float, seed: int) -> tuple[set[str], set[str]]:
    """Return the prompt ids to train on and the held-out ones, a rounded `share` of all.

    Each side has at least one. The order of `ids` does not matter. Fewer than two raise
    `OptionError`.
    """
    prompts = sorted(set(ids))
    if len(prompts) < 2:
        raise OptionError(
            f"{len(prompts)} prompts with an answer are too few for a training set and a held-out "
            "set"
        )
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    shuffled = [prompts[index] for index in order]
    num_held = min(max(1, round(share * len(prompts))), len(prompts) - 1)
    return set(shuffled[num_held:]), set(shuffled[:num_held])


def by_slot(right: Sequence[Sequence[bool]], length: int | None = None) -> dict[str, float]:
    """Return the accuracy of each token of a draft of `length` tokens, by default the longest one.

    "slot_j" is the share of right tokens at position j, from 1; "slot_j_given" is the share among
    drafts whose tokens before j are right. 0 if there are none. Drafts in `right` may be cut short.
    """
    figures: dict[str, float] = {}
    for slot in range(max(map(len, right), default=0) if length is None else length):
        seen = [row for row in right if len(row) > slot]
        before = [row for row in seen if all(row[:slot])]
        for name, rows in (("", seen), ("_given", before)):
            figures[f"slot_{slot + 1}{name}"] = sum(r[slot] for r in rows) / max(len(rows), 1)
    return figures


def tau(runs: Sequence[Sequence[int]]) -> float:
    """Return the mean number of accepted tokens per round of greedy drafts.

    `runs` has per answer and position the number of accepted tokens of a draft that starts there. A
    round accepts that many and adds the bonus token.
    """
    rounds = accepted = 0
    for row in runs:
        position = 0
        while position < len(row):
            rounds, accepted = rounds + 1, accepted + row[position]
            position += row[position] + 1
    return accepted / max(rounds, 1)


def acceptance(matches: Sequence[Tensor]) -> dict[str, float]:
    """Return `by_slot`, tau and alpha of chains.

    `matches` has per text (drafts, length) bool, True for right tokens. "tau" is the number of
    accepted tokens per round of greedy chains of that length, "alpha" the share of all tokens that
    were drafted (Gao et al. 2024, arXiv 2412.12639).
    """
    figures = by_slot([row for match in matches for row in match.tolist()])
    figures["tau"] = tau([match.long().cumprod(dim=1).sum(dim=1).tolist() for match in matches])
    # A round also has the bonus token.
    figures["alpha"] = figures["tau"] / (figures["tau"] + 1)
    return figures
