"""What recorded steps leave: for the same model only, unchanged, one call at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_spec.devices import graph_store
from hf_spec.devices.graph_store import Kept, state_of
from tests import tiny_models


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    graph_store.forget()
    yield
    graph_store.forget()


def kept(key: object, state: object = 0, capacity: int = 256) -> Kept:
    return Kept(key, state, capacity, ({}, {}), {}, None)  # type: ignore[arg-type]


def model() -> Any:
    return copy.deepcopy(tiny_models.build("llama"))


class TestStore:
    """Giving and taking."""

    def test_what_is_taken_is_gone(self) -> None:
        net, one = nn.Linear(1, 1), kept("a")
        graph_store.give(net, one)
        assert graph_store.take(nn.Linear(1, 1), "a", 0, 0) is None
        assert graph_store.take(net, "b", 0, 0) is None
        assert graph_store.take(net, "a", 0, 256) is one
        assert graph_store.take(net, "a", 0, 0) is None

    def test_too_little_room_and_another_state_are_of_no_use(self) -> None:
        net = nn.Linear(1, 1)
        graph_store.give(net, kept("a"))
        assert graph_store.take(net, "a", 0, 257) is None
        graph_store.give(net, kept("a"))
        graph_store.give(net, kept("b", state=1))
        assert graph_store.take(net, "b", 1, 0) is not None
        assert graph_store.take(net, "a", 0, 0) is None, "it was dropped when the state differed"

    def test_few_are_kept(self) -> None:
        net = nn.Linear(1, 1)
        for key in range(graph_store.MAX_KEPT + 1):
            graph_store.give(net, kept(key))
        found = [graph_store.take(net, key, 0, 0) for key in range(graph_store.MAX_KEPT + 1)]
        assert [one is None for one in found] == [True] + [False] * graph_store.MAX_KEPT

    def test_it_goes_with_the_model(self) -> None:
        net, one = nn.Linear(1, 1), kept("a")
        gone = weakref.ref(one)
        graph_store.give(net, one)
        graph_store.refuse(net, "why")
        assert graph_store.refusal(net) == "why"
        del net, one
        gc.collect()
        assert gone() is None

    def test_forgetting(self) -> None:
        net = nn.Linear(1, 1)
        graph_store.give(net, kept("a"))
        graph_store.refuse(net, "why")
        graph_store.forget()
        assert graph_store.take(net, "a", 0, 0) is None
        assert graph_store.refusal(net) is None


def replace_weight(net: Any) -> None:
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())


def patch_forward(net: Any) -> None:
    forward = net.model.norm.forward
    net.model.norm.forward = lambda states: forward(states) * 2


def hook(net: Any) -> None:
    net.model.norm.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight": replace_weight,
    "a forward": patch_forward,
    "a hook": hook,
    "a dtype": lambda net: net.half(),
    "a mode": lambda net: net.train(),
    "a number of a layer": lambda net: setattr(net.model.norm, "variance_epsilon", 0.5),
    "a setting": lambda net: setattr(net.config, "rms_norm_eps", 0.5),
    "a list in a setting": lambda net: net.config.rope_parameters.update(rope_theta=3.0),
    "a layer": lambda net: net.model.layers.pop(0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_the_model_shows(name: str) -> None:
    net = model()
    before = state_of(net)
    assert state_of(net) == before
    CHANGES[name](net)
    assert state_of(net) != before


def test_adapters_show() -> None:
    net: Any = get_peft_model(model(), LoraConfig(target_modules=["q_proj"]))
    before = state_of(net)
    assert state_of(net) == before
    with net.disable_adapter():
        assert state_of(net) != before
    assert state_of(net) == before
    net.base_model.model.model.layers[0].self_attn.q_proj.scaling["default"] = 7.0
    assert state_of(net) != before


def test_settings_of_pytorch_show() -> None:
    net = nn.Linear(1, 1)
    before = state_of(net)
    with torch.inference_mode():
        assert state_of(net) != before
    with torch.autocast("cuda", torch.bfloat16, enabled=True):
        assert state_of(net) != before
    assert state_of(net) == before


def test_generations_leave_the_state_as_it_was() -> None:
    """Otherwise nothing would ever be taken up."""
    net = model()
    before = state_of(net)
    ids = torch.arange(5)[None]
    for options in ({}, {"spec_strategy": "lookup"}):
        net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)
        assert state_of(net) == before
