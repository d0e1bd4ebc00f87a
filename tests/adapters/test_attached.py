"""The module with the adapters that are attached to a model."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from hf_spec.adapters.attached import LAYER_NAME, active_adapters
from hf_spec.generation.peft_type import SpecLayer, spec_layer
from tests.adapters.samples import sample


@pytest.fixture
def layer() -> SpecLayer:
    layer = SpecLayer()
    layer.adapters = {"a": sample("falcon"), "b": sample("disco")}
    return layer


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("a", ["a"]),
        (["b", "a"], ["b", "a"]),
        # Names of other adapters, for instance of a LoRA, say nothing here.
        ("lora", ["b"]),
        (["lora", "a"], ["a"]),
        ([], []),
    ],
)
def test_choosing(layer: SpecLayer, names: Any, expected: list[str]) -> None:
    layer.set_adapter("b")
    layer.set_adapter(names)
    assert layer.active == [layer.adapters[name] for name in expected]


def test_switching_off_and_deleting(layer: SpecLayer) -> None:
    layer.set_adapter("a")
    layer.enable_adapters(False)
    assert layer.active == []
    layer.enable_adapters(True)
    assert layer.active == [sample("falcon")]
    with pytest.warns(UserWarning, match="is now deleted"):
        layer.delete_adapter("a")
    assert layer.active == [sample("disco")]
    layer.delete_adapter("b")
    assert layer.active == []


def test_it_has_no_weights(layer: SpecLayer) -> None:
    assert layer.state_dict() == {}
    assert list(layer.parameters()) == []
    assert layer.weight is None
    assert repr(layer) == "SpecLayer(a: falcon, b: disco)"


def test_models_with_and_without(layer: SpecLayer) -> None:
    model = nn.Linear(2, 2)
    assert spec_layer(model) is None
    assert active_adapters(model) == []
    setattr(model, LAYER_NAME, layer)
    layer.set_adapter("a")
    assert spec_layer(model) is layer
    assert active_adapters(model) == [sample("falcon")]
