"""Temporary forwards of modules: overlapping blocks, and the forwards that they replace."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

from hf_spec.engine.forward.forward_overrides import ForwardOverrides


def ours() -> str:
    return "ours"


def all_of(modules: list[nn.Module]) -> dict[nn.Module, Callable[[], str]]:
    return dict.fromkeys(modules, ours)


def test_the_last_user_gives_the_forward_back() -> None:
    module, forwards = nn.Linear(2, 2), ForwardOverrides()
    before = dict(vars(module))
    asked: list[list[nn.Module]] = []

    def make(modules: list[nn.Module]) -> dict[nn.Module, Callable[[], str]]:
        asked.append(modules)
        return all_of(modules)

    first, second = forwards.install([module], make), forwards.install([module], make)
    with first:
        second.__enter__()
    assert module.forward() == "ours"
    second.__exit__(None, None, None)
    assert vars(module) == before
    assert asked == [[module], []]


def test_modules_may_be_left_as_they_are() -> None:
    taken, left = nn.Linear(2, 2), nn.Linear(2, 2)
    with ForwardOverrides().install([taken, left], lambda modules: all_of(modules[:1])):
        assert taken.forward() == "ours"
        assert "forward" not in vars(left)


def test_what_cannot_be_made_leaves_all_as_it_was() -> None:
    shared, other, forwards = nn.Linear(2, 2), nn.Linear(2, 2), ForwardOverrides()

    def fail(modules: list[nn.Module]) -> dict[nn.Module, Callable[[], str]]:
        raise MemoryError

    with forwards.install([shared], all_of):
        with pytest.raises(MemoryError), forwards.install([shared, other], fail):
            pass
        assert shared.forward() == "ours"
    assert "forward" not in {**vars(shared), **vars(other)}


def test_a_forward_of_the_module_itself_comes_back() -> None:
    module, forwards = nn.Linear(2, 2), ForwardOverrides()
    module.forward = lambda: "theirs"
    with forwards.install([module], all_of):
        assert module.forward() == "ours"
    assert module.forward() == "theirs"


def test_it_is_known_whose_forward_a_module_has() -> None:
    taken, other, forwards = nn.Linear(2, 2), nn.Linear(2, 2), ForwardOverrides()
    other.forward = lambda: "theirs"
    with forwards.install([taken, other], lambda modules: all_of([taken])):
        assert forwards.has(taken)
        assert not forwards.has(other)
        taken.forward = lambda: "theirs"
        assert not forwards.has(taken)
    assert not forwards.has(nn.Linear(2, 2))


def test_what_somebody_else_put_there_meanwhile_stays() -> None:
    module, forwards = nn.Linear(2, 2), ForwardOverrides()
    with forwards.install([module], all_of):
        module.forward = lambda: "theirs"
    assert module.forward() == "theirs"
