"""Configs of EAGLE heads: aux layers, rotary base, and values that the user overrides."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hf_spec import AssistantError
from hf_spec.adapters.published import PublishedHead
from hf_spec.engine.forward.last_layer import BEFORE_NORM
from hf_spec.methods.eagle.spec import EagleSpec, canonical_names, read_spec
from tests import published_heads as heads

KEY = "eagle_aux_hidden_state_layer_ids"
DEPTH = 36


def target() -> Any:
    return SimpleNamespace(num_hidden_layers=DEPTH, hidden_size=heads.WIDTH)


def spec(
    config: dict[str, Any], count: int = 3, overrides: tuple[tuple[str, Any], ...] = ()
) -> EagleSpec:
    tensors = heads.random_tensors(heads.sizes(num_aux=count, prefix="midlayer."))
    full = {**heads.plain_config(), **config}
    head = PublishedHead("eagle3", full, tensors, Path(), "a head", overrides)
    return read_spec(head, canonical_names(tensors), target())


def inner(ids: Any, **more: Any) -> dict[str, Any]:
    return {"eagle_config": {KEY: ids, **more}}


LAYERS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("SafeAILab", {}, (2, 18, 33)),
    ("speculators: indices", {KEY: [2, 18, 33]}, (2, 18, 33)),
    ("speculators: others", {KEY: [4, 20, 30]}, (4, 20, 30)),
    ("speculators: nothing", {KEY: None}, (2, 18, 33)),
    ("SpecForge: outputs of layers", inner([1, 17, 32]), (2, 18, 33)),
    ("converted from SpecForge", {KEY: [1, 17, 32]}, (2, 18, 33)),
    ("SGLang: the first is 1", inner([1, 11, 21]), (2, 12, 22)),
    ("SpecForge: taken as they are", inner([3, 19, 34]), (3, 19, 34)),
    ("NVIDIA: the last before the norm", inner([24, 30, 36]), (24, 30, BEFORE_NORM)),
    ("DeepSpec: the embedding is -1", {"target_layer_ids": [-1, 16, 31]}, (0, 17, 32)),
]


@pytest.mark.parametrize(("config", "layers"), [c[1:] for c in LAYERS], ids=[c[0] for c in LAYERS])
def test_layers(config: dict[str, Any], layers: tuple[int, ...]) -> None:
    assert spec(config).hidden_layers == layers


def test_a_single_normed_state() -> None:
    assert spec(inner([1, 2, 3], use_aux_hidden_state=False), count=1).hidden_layers == (-1,)
    assert spec({}, count=1).hidden_layers == (-1,)


def test_what_the_user_says_comes_first(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        said = spec(inner([1, 17, 32]), overrides=(("aux_layers", (1, 17, 32)),))
        assert said.hidden_layers == (1, 17, 32)
        assert not caplog.records
        spec({})
    assert "does not name its aux layers" in caplog.text


@pytest.mark.parametrize(
    ("config", "count"),
    [({KEY: [1, 2]}, 3), ({}, 4), ({KEY: [1, 2, 99]}, 3), ({KEY: [-5, 2, 9]}, 3)],
)
def test_layers_that_cannot_be(config: dict[str, Any], count: int) -> None:
    with pytest.raises(AssistantError, match=f"pass aux_layers= with {count} indices"):
        spec(config, count)


ROPES: list[tuple[dict[str, Any], float]] = [
    ({}, 10000.0),
    ({"rope_theta": 500000}, 500000.0),
    ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7}, 7.0),
]


@pytest.mark.parametrize(("config", "theta"), ROPES)
def test_the_rotary_base_is_its_own(config: dict[str, Any], theta: float) -> None:
    assert spec(config).rope["rope_theta"] == theta
    assert spec(config, overrides=(("rope_theta", 5.0),)).rope["rope_theta"] == 5.0
    layer = heads.speculators_config()
    layer["transformer_layer_config"].pop("rope_theta")
    layer["transformer_layer_config"].update(config)
    assert spec(layer).rope["rope_theta"] == theta


def test_scaling_is_kept() -> None:
    scaling = {"type": "yarn", "factor": 4.0}
    assert spec({"rope_scaling": scaling}).rope == {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 10000.0,
    }


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": "high"},
        {"rope_theta": -1},
        {"norm_output": "yes"},
        {"head_dim": 7},
        {"head_dim": "x"},
        {"transformer_layer_config": 3},
        {"num_attention_heads": 0},
    ],
)
def test_configs_that_lie(config: dict[str, Any]) -> None:
    with pytest.raises(AssistantError, match="'a head' is damaged"):
        spec(config)
