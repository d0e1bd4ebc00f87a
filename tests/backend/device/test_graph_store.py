"""Stored CUDA graphs: reused only for the same, unchanged model, by one call at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.graph_store import StoredGraphs, state_of
from tests import tiny_models

pytestmark = pytest.mark.usefixtures("no_stored_graphs")


def kept(net: nn.Module, key: object, capacity: int = 256) -> StoredGraphs:
    return StoredGraphs(key, state_of(net), capacity, ({}, {}), {}, None)  # type: ignore[arg-type]


def model() -> Any:
    """Return a model that also uses a module outside its module tree, and itself."""
    net: Any = copy.deepcopy(tiny_models.build("llama"))
    net.others = [nn.Embedding(2, 2), net]
    return net


class TestStore:
    """Storing graphs and taking them back."""

    def test_what_is_taken_is_gone(self) -> None:
        net = nn.Linear(1, 1)
        one = kept(net, "a")
        graph_store.put(net, one)
        assert graph_store.pop(nn.Linear(1, 1), "a", 0) is None
        assert graph_store.pop(net, "a", 256) is one
        assert graph_store.pop(net, "a", 0) is None

    @pytest.mark.parametrize("reason", ["key", "room", "state"])
    def test_what_does_not_fit_is_freed(self, reason: str) -> None:
        net = nn.Linear(1, 1)
        graph_store.put(net, kept(net, "a"))
        if reason == "state":
            net.weight = nn.Parameter(net.weight.detach().clone())
        found = graph_store.pop(net, "b" if reason == "key" else "a", 257 * (reason == "room"))
        assert found is None
        assert net not in graph_store._stored

    def test_one_pool_is_kept_of_a_model(self) -> None:
        net = nn.Linear(1, 1)
        first, second = kept(net, "a"), kept(net, "b")
        gone = weakref.ref(first)
        graph_store.put(net, first)
        graph_store.put(net, second)
        del first
        assert gone() is None
        assert graph_store.pop(net, "b", 0) is second

    def test_it_goes_with_the_model(self) -> None:
        net = nn.Linear(1, 1)
        one = kept(net, "a")
        gone = weakref.ref(one)
        graph_store.put(net, one)
        graph_store.refusals[net] = "why"
        assert graph_store.refusals.get(net) == "why"
        del net, one
        gc.collect()
        assert gone() is None

    def test_freeing_and_forgetting(self) -> None:
        nets = nn.Linear(1, 1), nn.Linear(1, 1)
        for forget, refusal in ((graph_store.free, "why"), (graph_store.forget, None)):
            for net in nets:
                graph_store.put(net, kept(net, "a"))
                graph_store.refusals[net] = "why"
            forget()
            assert [graph_store.pop(net, "a", 0) for net in nets] == [None, None]
            assert [graph_store.refusals.get(net) for net in nets] == [refusal, refusal]


def replace_weight(net: Any) -> None:
    net.lm_head.weight = nn.Parameter(net.lm_head.weight.detach().clone())


def replace_others_weight(net: Any) -> None:
    other = net.others[0]
    other.weight = nn.Parameter(other.weight.detach().clone())


def patch_forward(net: Any) -> None:
    forward = net.model.norm.forward
    net.model.norm.forward = lambda states: forward(states) * 2


def hook(net: Any) -> None:
    net.model.norm.register_forward_hook(lambda *_: None)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a weight": replace_weight,
    "a weight of another module": replace_others_weight,
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
    """Otherwise stored graphs would never be reused."""
    net = model()
    before = state_of(net)
    ids = torch.arange(5)[None]
    for options in ({}, {"spec_strategy": "lookup"}):
        net.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, **options)
        assert state_of(net) == before
