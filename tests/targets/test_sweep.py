"""Every text and image-text class of transformers: plain `generate()`'s tokens, or a sentence.

A tiny model is made of the defaults of each class's config. Some classes cannot be made so; what
can be is never wrong and never crashes. Some classes by default, all in the slow tier.
"""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import UnsupportedError
from tests.any_class import NotMadeError, build, classes
from tests.tiny_models import left_padded

CLASSES = classes()
SAMPLE = CLASSES[::7]
NEW_TOKENS = {"one": 40, "ragged": 24}
IDENTICAL, REFUSED, WRONG, NOT_MADE = "identical", "refused", "wrong", "not made"
# Of the 268 classes of transformers 5.23; 55 are refused, 56 cannot be made tiny so.
AT_LEAST = 157


@cache
def prompts() -> dict[str, dict[str, Tensor]]:
    """One prompt that repeats itself, and three of unlike lengths, for drafts by lookup."""
    generator = torch.Generator().manual_seed(1)
    seven, five, four = (torch.randint(3, 80, (n,), generator=generator) for n in (7, 5, 4))
    long = seven.repeat(4)[:24]
    return {
        "one": {"input_ids": long[None]},
        "ragged": left_padded([long, five.repeat(3)[:13], four]),
    }


def generate(model: Any, kind: str, **options: Any) -> Tensor:
    tokens: Tensor = model.generate(
        **prompts()[kind], max_new_tokens=NEW_TOKENS[kind], do_sample=False, **options
    )
    return tokens


def plain(model: Any, kind: str) -> Tensor:
    try:
        return generate(model, kind)
    except Exception as error:
        raise NotMadeError(f"plain generate: {error}") from error


def agrees(model: Any, kind: str) -> bool | None:
    """Whether tokens are those of plain `generate()`; None if the call is refused."""
    expected = plain(model, kind)
    try:
        return torch.equal(generate(model, kind, spec_strategy="lookup"), expected)
    except UnsupportedError:
        return None


@cache
def outcome(kind: str, name: str) -> str:
    """What becomes of a class; an error that is not one of ours is raised."""
    try:
        model = build(kind, name)
        one = agrees(model, "one")
    except NotMadeError:
        return NOT_MADE
    with suppress(NotMadeError):
        # Some classes take no batch, or none with padding.
        if one and agrees(model, "ragged") is False:
            return WRONG
    return {True: IDENTICAL, False: WRONG, None: REFUSED}[one]


@pytest.mark.parametrize(("kind", "name"), SAMPLE, ids=[name for _, name in SAMPLE])
def test_some_classes(kind: str, name: str) -> None:
    assert outcome(kind, name) != WRONG


def test_the_sample_says_something() -> None:
    found = Counter(outcome(kind, name) for kind, name in SAMPLE)
    assert found[IDENTICAL] >= len(SAMPLE) // 2


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "name"), CLASSES, ids=[name for _, name in CLASSES])
def test_every_class(kind: str, name: str) -> None:
    assert outcome(kind, name) != WRONG


@pytest.mark.slow
def test_how_many_are_served() -> None:
    found = Counter(outcome(kind, name) for kind, name in CLASSES)
    assert found[IDENTICAL] >= AT_LEAST, found
