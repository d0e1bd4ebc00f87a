"""Copies for sequences that advance at different speeds: copied and shared members."""

from __future__ import annotations

import io
import queue
import threading
from typing import Any

import pytest
import torch

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.copies import independent_copies
from tests import tiny_models


class Held:
    def __init__(self, member: Any):
        self.member = member


def copied(thing: Any, purpose: str = "rows") -> Any:
    [copy] = independent_copies([thing], lambda _: False, purpose)
    return copy


@pytest.mark.parametrize("member", [[1, 2], {"seen": {3}}, torch.zeros(2)], ids=type)
def test_what_is_remembered_is_copied(member: Any) -> None:
    thing = Held(member)
    assert copied(thing).member is not member


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.nn.Linear(2, 2),
        tiny_models.tokenizer,
        threading.Event,
        threading.Lock,
        threading.RLock,
        threading.Condition,
        queue.Queue,
        io.StringIO,
    ],
)
def test_what_reaches_out_or_is_large_is_shared(make: Any) -> None:
    thing = Held(make())
    mine = copied(thing)
    assert mine is not thing
    assert mine.member is thing.member


def test_what_cannot_be_copied_is_named() -> None:
    thing = Held(number for number in range(3))
    with pytest.raises(UnsupportedError, match=r"Held cannot be copied.*cannot follow five rows"):
        copied(thing, "five rows")


def test_what_several_refer_to_is_copied_once() -> None:
    things = [Held([1]), Held(None), Held(None)]
    things[1].member = things[2].member = things[0]
    mine = independent_copies(things, lambda thing: thing is things[2], "rows")
    assert mine[0] is not things[0]
    assert mine[1].member is mine[0]
    assert mine[2] is things[2]
