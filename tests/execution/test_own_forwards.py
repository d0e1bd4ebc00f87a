"""Forwards that modules have for a while: blocks that overlap, and what was there before."""

from __future__ import annotations

from torch import nn

from hf_spec.execution.own_forwards import OwnForwards


def ours() -> str:
    return "ours"


def test_the_last_user_gives_the_forward_back() -> None:
    module, forwards = nn.Linear(2, 2), OwnForwards()
    before = dict(vars(module))
    assert not forwards.join(module)
    forwards.give(module, ours)
    assert forwards.join(module)
    forwards.leave(module)
    assert module.forward() == "ours"
    forwards.leave(module)
    assert vars(module) == before
    assert not forwards.join(module)


def test_a_forward_of_the_module_itself_comes_back() -> None:
    module, forwards = nn.Linear(2, 2), OwnForwards()
    module.forward = lambda: "theirs"
    forwards.give(module, ours)
    forwards.leave(module)
    assert module.forward() == "theirs"


def test_what_somebody_else_put_there_meanwhile_stays() -> None:
    module, forwards = nn.Linear(2, 2), OwnForwards()
    forwards.give(module, ours)
    module.forward = lambda: "theirs"
    forwards.leave(module)
    assert module.forward() == "theirs"
