"""What programs depend on, and one that is really compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import hf_spec
from hf_spec.execution import layer_programs
from hf_spec.execution.cpu_linear import joint_product
from hf_spec.execution.layer_programs import LayerCall, kind_of
from tests import tiny_models


def call(tokens: int, *rest: Any) -> LayerCall:
    states, pair = torch.zeros(1, tokens, 8), torch.zeros(1, tokens, 4)
    return LayerCall((states,), {"rotation": (pair, pair), "rest": rest, "spec_step": None})


def test_calls_of_a_program_differ_in_length_alone() -> None:
    assert call(2).looks != call(3).looks
    assert call(2).kind() == call(3).kind() == call(8).kind()
    assert call(1).kind() != call(2).kind()
    assert call(2, True).kind() != call(2, False).kind()
    assert call(2, object()).kind() is None


def test_layers_of_a_kind_differ_in_weights_and_index_alone() -> None:
    first, second, third = copy.deepcopy(tiny_models.build("gemma3")).model.layers
    assert kind_of(first) == kind_of(third)
    assert kind_of(first) != kind_of(second), "one has a window"
    third.mlp.up_proj = nn.Linear(32, 64, bias=True)
    assert kind_of(first) != kind_of(third)


def test_products_of_the_same_states_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Queries, keys and values; gate and up only where they are small."""
    seen: set[int] = set()

    def note(linears: list[nn.Linear], states: torch.Tensor) -> torch.Tensor:
        seen.add(len(linears))
        return joint_product(linears, states)

    monkeypatch.setattr(layer_programs, "_lower", lambda graph, inputs: graph)
    monkeypatch.setattr(layer_programs, "joint_product", note)
    for limit, groups in ((1 << 20, {2, 3}), (3000, {3}), (100, set[int]())):
        monkeypatch.setattr(layer_programs, "MAX_JOINT_ELEMENTS", limit)
        seen.clear()
        report = hf_spec.compile(copy.deepcopy(tiny_models.build("llama")))
        assert (report.layers, seen) == (3, groups)


def test_a_compiled_model_gives_the_same_tokens() -> None:
    """By inductor; the tests of `compiled_layers` trace only."""
    target = copy.deepcopy(tiny_models.build("llama"))
    report = hf_spec.compile(target)
    assert (report.layers, report.programs, report.refused) == (3, 2, {})
    given = {**tiny_models.prompts("llama", "ragged"), "max_new_tokens": 12, "do_sample": False}
    plain = target.generate(**given)
    for strategy in ("none", "lookup"):
        assert torch.equal(target.generate(**given, spec_strategy=strategy), plain)
