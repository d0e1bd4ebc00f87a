"""State that layers are compiled from: its key, and the changes that are detected."""

from __future__ import annotations

import copy
import dataclasses
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LogitsProcessor
from transformers.models.llama import modeling_llama

import hf_spec
from hf_spec.engine.fast import compiled_layers, layer_state
from hf_spec.engine.fast.layer_state import LayerState, UnwatchableError
from hf_spec.engine.forward.low_rank_change import ChosenTokens, LowRankChange
from tests import tiny_models
from tests.compiler import needs_compiler

SETTINGS = {"strength": 1.0}
HELPER = [2.0]


def scaled(states: torch.Tensor) -> torch.Tensor:
    return states * SETTINGS["strength"] * len(HELPER)


@dataclasses.dataclass
class Control:
    strength: float = 1.0
    vector: Any = None


class Slotted:
    __slots__ = ("strength",)

    def __init__(self) -> None:
        self.strength = 1.0


class Steered(nn.Module):
    """MLP whose output depends on state of every kind."""

    by_class = 1.0

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner
        self.control = Control()
        self.space = types.SimpleNamespace(nested={"strength": [1.0]})
        self.slotted = Slotted()
        self.number = 1.0
        self.function = scaled
        self.partial = functools.partial(torch.mul, other=1.0)
        self.closure = make_closure({"strength": 1.0})
        self.method = types.MethodType(lambda control, states: states * control.strength, Control())

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        found = self.partial(self.function(self.inner(states))) * self.number * self.by_class
        found = found * self.space.nested["strength"][0] * self.slotted.strength
        found = self.closure(self.method(found * self.control.strength))
        return found if self.control.vector is None else found + self.control.vector


def make_closure(settings: dict[str, float]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda states: states * settings["strength"]


def steered() -> Any:
    model = copy.deepcopy(tiny_models.build("llama"))
    for layer in model.model.layers:
        layer.mlp = Steered(layer.mlp)
    return model


@pytest.fixture
def target() -> Any:
    return steered()


def twice_scaled(states: torch.Tensor) -> torch.Tensor:
    return states * -2.0 * SETTINGS["strength"]


def set_content(cell: Any, value: Any) -> None:
    cell.cell_contents = value


# Changes that may happen between two forward passes, by name.
CHANGES: dict[str, Callable[[pytest.MonkeyPatch, Any], Any]] = {
    "a value": lambda patch, mlp: setattr(mlp, "number", -2.0),
    "a field of a dataclass": lambda patch, mlp: setattr(mlp.control, "strength", -2.0),
    "an object by an equal one, which changes": lambda patch, mlp: (
        setattr(mlp, "control", Control()),
        setattr(mlp.control, "strength", -2.0),
    ),
    "a tensor that was None": lambda patch, mlp: setattr(mlp.control, "vector", torch.ones(32)),
    "a list in a dictionary in an object": lambda patch, mlp: mlp.space.nested[
        "strength"
    ].__setitem__(0, -2.0),
    "an entry of slots": lambda patch, mlp: setattr(mlp.slotted, "strength", -2.0),
    "a function": lambda patch, mlp: setattr(mlp, "function", torch.relu),
    "the code of a function": lambda patch, mlp: patch.setattr(
        scaled, "__code__", twice_scaled.__code__
    ),
    "a keyword of a partial": lambda patch, mlp: mlp.partial.keywords.update(other=-2.0),
    "what a closure holds": lambda patch, mlp: mlp.closure.__closure__[0].cell_contents.update(
        strength=-2.0
    ),
    "a cell of a closure": lambda patch, mlp: set_content(
        mlp.closure.__closure__[0], {"strength": -2.0}
    ),
    "the owner of a bound method": lambda patch, mlp: setattr(
        mlp.method.__self__, "strength", -2.0
    ),
    "a class attribute": lambda patch, mlp: patch.setattr(Steered, "by_class", -2.0),
    "the forward of a class": lambda patch, mlp: patch.setattr(
        Steered, "forward", lambda self, states: -2.0 * self.inner(states)
    ),
    "a global dictionary": lambda patch, mlp: patch.setitem(SETTINGS, "strength", -2.0),
    "a global that a function reads": lambda patch, mlp: patch.setattr(f"{__name__}.HELPER", []),
    "a class of transformers": lambda patch, mlp: patch.setattr(
        modeling_llama.LlamaMLP,
        "forward",
        lambda self, states: -2.0 * self.up_proj(states)[..., :32],
    ),
    "a function of the modeling file": lambda patch, mlp: patch.setattr(
        modeling_llama, "rotate_half", lambda states: states
    ),
    "a function of the modeling file, one call away": lambda patch, mlp: patch.setattr(
        modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin, **_: (q, k)
    ),
    "a method that overrides one of a base class": lambda patch, mlp: patch.setattr(
        Steered, "__call__", lambda self, states: -2.0 * self.forward(states), raising=False
    ),
    "the parameter": lambda patch, mlp: setattr(
        mlp.inner.up_proj, "weight", nn.Parameter(-mlp.inner.up_proj.weight.detach())
    ),
    "the storage of a parameter": lambda patch, mlp: setattr(
        mlp.inner.up_proj.weight, "data", -mlp.inner.up_proj.weight.detach()
    ),
    "a submodule": lambda patch, mlp: setattr(mlp.inner, "act_fn", nn.Tanh()),
    "a buffer that is new": lambda patch, mlp: mlp.register_buffer("extra", torch.ones(1)),
    "a hook": lambda patch, mlp: mlp.inner.register_forward_hook(lambda m, given, out: -2.0 * out),
    "a forward of its own": lambda patch, mlp: setattr(
        mlp.inner, "forward", lambda states: -2.0 * states
    ),
    "training mode": lambda patch, mlp: mlp.train(),
    "a field of the config": lambda patch, mlp: setattr(
        mlp.inner.config, "some_new_field", "value"
    ),
}


@pytest.mark.parametrize("change", ["another A", "the storage of B", "a hook less"])
def test_a_low_rank_change_that_differs_is_seen(change: str, target: Any) -> None:
    linear = target.model.layers[1].mlp.inner.up_proj
    hook = LowRankChange(torch.randn(2, 32), torch.randn(64, 2), ChosenTokens())
    handle = linear.register_forward_hook(hook)
    state, keys = state_of(target)
    assert state.holds()
    if change == "another A":
        hook.down = hook.down.clone()
    elif change == "the storage of B":
        hook.up.data = hook.up.clone()
    else:
        handle.remove()
    assert not state.holds()
    assert state_of(target)[1] == keys


def state_of(model: Any) -> tuple[LayerState, list[Any]]:
    state = LayerState()
    keys = [state.add(layer) for layer in model.model.layers]
    code = state.seal()
    return state, [(key, code) for key in keys]


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str, target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    state, _ = state_of(target)
    assert state.holds()
    CHANGES[change](monkeypatch, target.model.layers[1].mlp)
    assert not state.holds()


# Their keys need not differ: weights and buffers are inputs of compiled layers, and layers with
# hooks, a forward of their own, or in training mode run uncompiled.
ALIKE = {"a buffer that is new", "a hook", "a forward of its own", "the parameter"}
ALIKE |= {"the storage of a parameter", "training mode"}


@pytest.mark.parametrize("change", sorted(CHANGES.keys() - ALIKE))
def test_a_change_of_the_result_changes_the_key(
    change: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, before = state_of(target)
    CHANGES[change](monkeypatch, target.model.layers[1].mlp)
    _, after = state_of(target)
    assert after[1] != before[1]


class Change(LogitsProcessor):
    """Processor that changes the model after some tokens, as steering or scheduling may do."""

    def __init__(self, change: str, patch: pytest.MonkeyPatch, model: Any, length: int):
        self.change, self.patch, self.model, self.length = change, patch, model, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == self.length:
            for layer in self.model.model.layers:
                CHANGES[self.change](self.patch, layer.mlp)
        return scores


@pytest.mark.by_default(change=("a value",))
@needs_compiler
@pytest.mark.parametrize("change", sorted(CHANGES.keys() - {"training mode"}))
def test_compiled_layers_follow_a_change_during_a_call(
    change: str, target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 12, "do_sample": False}
    config = hf_spec.NoneConfig(compile=True)
    assert torch.equal(target.generate(**prompt, spec_strategy=config), target.generate(**prompt))
    found = []
    for model, options in ((steered(), {}), (target, {"spec_strategy": config})):
        with monkeypatch.context() as patch:
            rule = Change(change, patch, model, prompt["input_ids"].shape[1] + 5)
            found.append(model.generate(**prompt, **options, logits_processor=[rule]))
            found.append(model.generate(**prompt, **options))
    assert torch.equal(found[2], found[0])
    assert torch.equal(found[3], found[1])
    # No code reads the new buffer or the new field.
    inert = {"a buffer that is new", "a field of the config"}
    assert change in inert or not torch.equal(found[0], target_output(prompt))


def target_output(prompt: dict[str, Any]) -> torch.Tensor:
    output: torch.Tensor = steered().generate(**prompt)
    return output


@pytest.mark.parametrize("name", ["CB", "SCB", "threshold", "has_fp16_weights"])
def test_changes_of_8_bit_layers_are_seen(name: str) -> None:
    """bitsandbytes stores values in every call, which do not count as changes."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False).to("cpu").eval()
    linear.init_8bit_state()
    state = LayerState()
    state.add(nn.Sequential(linear))
    state.seal()
    linear.state.idx = torch.tensor([3])
    assert state.holds()
    setattr(linear.state, name, copy.copy(linear.state.SCB))
    assert not state.holds()


@pytest.mark.parametrize(
    "changed", ["codes", "scales", "scales in place", "table", "state", "dtype"]
)
def test_changes_of_4_bit_layers_are_seen(changed: str) -> None:
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(64, 64, quant_type="nf4").to("cpu").eval()
    state = LayerState()
    state.add(nn.Sequential(linear))
    state.seal()
    assert state.holds()
    quantization = linear.weight.quant_state
    if changed == "codes":
        linear.weight.data = linear.weight.data.clone()
    elif changed == "scales":
        quantization.absmax = quantization.absmax.view_as(quantization.absmax)
    elif changed == "scales in place":
        quantization.absmax.data = quantization.absmax.clone()
    elif changed == "table":
        quantization.quant_type = "fp4"
    elif changed == "state":
        linear.weight.quant_state = copy.copy(quantization)
    else:
        linear.compute_dtype = torch.float32
    assert not state.holds()


def test_a_4_bit_layer_without_a_quantization_state() -> None:
    """bitsandbytes restores the quantization state in the next call."""
    bnb = pytest.importorskip("bitsandbytes")
    linear = bnb.nn.Linear4bit(64, 64).to("cpu").eval()
    lost, linear.weight.quant_state = linear.weight.quant_state, None
    state = LayerState()
    state.add(nn.Sequential(linear))
    state.seal()
    assert state.holds()
    linear.weight.quant_state = lost
    assert not state.holds()


def test_layers_of_a_kind_differ_in_weights_and_index_alone() -> None:
    first, second, third = copy.deepcopy(tiny_models.build("gemma3")).model.layers
    state = LayerState()
    assert state.add(first) == state.add(third)
    assert state.add(first) != state.add(second), "one has a window"
    third.mlp.up_proj = nn.Linear(32, 64, bias=True)
    assert state.add(first) != LayerState().add(third)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (iter([1.0]), "list_iterator"),
        (threading.local(), "local"),
        ([nn.Linear(2, 2)], "not a submodule"),
    ],
)
def test_what_cannot_be_watched_is_an_error(value: Any, reason: str, target: Any) -> None:
    target.model.layers[0].mlp.odd = value
    with pytest.raises(UnwatchableError, match=rf"Steered\.odd.*{reason}"):
        state_of(target)
    report = hf_spec.compile(target)
    assert "model.layers.0" in report.refused


def test_a_layer_that_reads_too_much_is_an_error(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layer_state, "MAX_VALUES", 5)
    with pytest.raises(UnwatchableError, match="more than 5 values"):
        state_of(target)


def test_code_that_cannot_be_watched_is_followed_once(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Steered, "by_class", iter([1.0]))
    state = LayerState()
    for layer in target.model.layers:
        state.add(layer)
    with pytest.raises(UnwatchableError, match="by_class"):
        state.seal()
    assert state.holds()


def test_values_that_lead_back_to_themselves(target: Any) -> None:
    space = target.model.layers[0].mlp.space
    space.itself = space
    state, _ = state_of(target)
    assert state.holds()


@pytest.mark.full
@needs_compiler
def test_the_program_of_an_earlier_state_is_used_again(target: Any) -> None:
    first = hf_spec.compile(target)
    for layer in target.model.layers:
        layer.mlp.number = 2.0
    second = hf_spec.compile(target)
    for layer in target.model.layers:
        layer.mlp.number = 1.0
    third = hf_spec.compile(target)
    assert (first.layers, second.layers, third.layers) == (3, 3, 3)
    assert third.programs == second.programs > first.programs
    assert third.seconds == 0


@needs_compiler
def test_state_that_changes_often_ends_in_uncompiled_layers(
    target: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled_layers, "MAX_PROGRAMS", 2)
    prompt = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 6, "do_sample": False}
    for strength in (1.0, 0.5, 0.25, 1.0):
        for layer in target.model.layers:
            layer.mlp.number = strength
        found = target.generate(**prompt, spec_strategy=hf_spec.LookupConfig(compile=True))
        assert torch.equal(found, target.generate(**prompt))
    layers = compiled_layers.CompiledLayers.of(target)
    assert len(layers.functions) == 2
    assert all("changes often" in reason for reason in layers.refused.values())
