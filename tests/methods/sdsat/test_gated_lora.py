"""Gated LoRA: selected rows follow the formula, the others stay bit-identical."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from hf_spec import AssistantError, UnsupportedError
from hf_spec.methods.sdsat.gated_lora import GatedLora, linear_layers, merge_lora_inplace, new_lora
from tests.model_watch import snapshot
from tests.tiny_models import VOCAB, build


def random_lora(name: str, rank: int = 3) -> GatedLora:
    torch.manual_seed(0)
    lora = new_lora(build(name), rank)
    for _, up in lora.values():
        up.data.normal_(0, 0.2)
    return GatedLora(lora)


def gate(num_tokens: int, rows: slice | torch.Tensor = slice(None)) -> torch.Tensor:
    chosen = torch.zeros(num_tokens, dtype=torch.bool)
    chosen[rows] = True
    return chosen


@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "gpt_neox", "falcon_gqa"])
@torch.no_grad()
def test_every_layer_gets_the_change_at_the_chosen_rows_alone(name: str) -> None:
    model = build(name)
    lora = random_lora(name)
    for path, layer in linear_layers(model).items():
        down, up = lora.weights[path]
        x = torch.randn(2, 5, down.shape[1])
        plain = layer(x)
        change = x @ down.T @ up.T
        single = GatedLora({path: (down, up)})
        for rows in (slice(3, 7), torch.tensor([0, 4, 9])):
            with single.installed(model), single.acting_on(gate(10, rows)):
                found = layer(x).reshape(10, -1)
            flat = plain.reshape(10, -1).clone()
            untouched = torch.ones(10, dtype=torch.bool)
            untouched[rows] = False
            assert torch.equal(found[untouched], flat[untouched])
            flat[rows] += change.reshape(10, -1)[rows]
            torch.testing.assert_close(found, flat, atol=1e-5, rtol=1e-5)


def test_with_gradients_it_computes_the_same() -> None:
    layer = nn.Linear(6, 4)
    model = nn.ModuleDict({"layer": layer})
    down, up = nn.Parameter(torch.randn(2, 6)), nn.Parameter(torch.randn(4, 2))
    lora = GatedLora({"layer": (down, up)})
    x = torch.randn(1, 5, 6)
    for rows in (slice(1, 3), torch.tensor([0, 4])):
        with lora.installed(model), lora.acting_on(gate(5, rows)):  # type: ignore[arg-type]
            with torch.no_grad():
                plain = layer(x)
            learned = layer(x)
        torch.testing.assert_close(learned, plain)
        learned.sum().backward()
        for parameter in (down, up):
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0
            parameter.grad = None


@torch.no_grad()
def test_nothing_happens_outside_of_the_block() -> None:
    model = copy.deepcopy(build("llama"))
    before = snapshot(model)
    lora = random_lora("llama")
    ids = torch.arange(3, 12)[None]
    plain = model(ids).logits
    with lora.installed(model):
        assert torch.equal(model(ids).logits, plain)
        with lora.acting_on(gate(9, slice(4, 9))):
            changed = model(ids).logits
        assert torch.equal(model(ids).logits, plain)
    assert not torch.equal(changed[0, 4:], plain[0, 4:])
    assert torch.equal(changed[0, :4], plain[0, :4])
    assert snapshot(model) == before


def test_hooks_go_after_an_exception() -> None:
    model = copy.deepcopy(build("llama"))
    before = snapshot(model)
    lora = random_lora("llama")
    with pytest.raises(KeyError), lora.installed(model), lora.acting_on(gate(1)):
        raise KeyError
    assert snapshot(model) == before


@torch.no_grad()
def test_it_stops_acting_after_an_exception() -> None:
    model = copy.deepcopy(build("llama"))
    lora, ids = random_lora("llama"), torch.arange(3, 12)[None]
    plain = model(ids).logits
    with lora.installed(model):
        with pytest.raises(KeyError), lora.acting_on(gate(9, slice(4, 9))):
            raise KeyError
        assert torch.equal(model(ids).logits, plain)


class TestLayers:
    def test_all_but_the_head(self) -> None:
        names = set(linear_layers(build("llama")))
        assert len(names) == 3 * 7
        assert not any("lm_head" in name for name in names)

    def test_gpt2_has_its_own_class(self) -> None:
        layers = linear_layers(build("gpt2"))
        assert all(isinstance(layer, Conv1D) for layer in layers.values())
        lora = new_lora(build("gpt2"), 2)
        down, up = lora["transformer.h.0.attn.c_attn"]
        assert (down.shape, up.shape) == ((2, 32), (96, 2))

    def test_routed_experts_are_left_out(self) -> None:
        for name in ("mixtral", "qwen3_moe", "deepseek_v3"):
            assert not any(".experts." in path for path in linear_layers(build(name)))

    def test_targets(self) -> None:
        names = set(new_lora(build("llama"), 2, ["q_proj", "v_proj"]))
        assert {name.rpartition(".")[2] for name in names} == {"q_proj", "v_proj"}
        with pytest.raises(
            AssistantError, match=r"no layer is called attn_out; choose from .*q_proj"
        ):
            new_lora(build("llama"), 2, ["attn_out"])

    def test_new_ones_change_nothing(self) -> None:
        for down, up in new_lora(build("llama"), 4).values():
            assert down.abs().sum() > 0
            assert not up.any()

    def test_a_layer_that_sees_other_rows_is_refused(self) -> None:
        model = nn.ModuleDict({"layer": nn.Linear(6, 4)})
        lora = GatedLora({"layer": (torch.randn(2, 6), torch.randn(4, 2))})
        refused = pytest.raises(UnsupportedError, match="Linear saw 5 of 7 tokens")
        with lora.installed(model), lora.acting_on(gate(7, slice(0, 1))), refused:  # type: ignore[arg-type]
            model["layer"](torch.randn(5, 6))


class TestCheck:
    def test_a_layer_that_is_not_there(self) -> None:
        lora = GatedLora({"model.layers.9.q_proj": (torch.zeros(1, 1), torch.zeros(1, 1))})
        with pytest.raises(AssistantError, match=r"model.layers.9.q_proj, which the model lacks"):
            lora.check(build("llama"))

    def test_another_size(self) -> None:
        name = "model.layers.0.self_attn.q_proj"
        lora = GatedLora({name: (torch.zeros(2, 32), torch.zeros(16, 2))})
        with pytest.raises(AssistantError, match=r"\(16, 2\), which do not fit 32 inputs and 32"):
            lora.check(build("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@torch.no_grad()
def test_merging_is_the_same_as_acting_everywhere(name: str) -> None:
    model = copy.deepcopy(build(name))
    lora = random_lora(name)
    ids = torch.arange(5, 15)[None] % VOCAB
    with lora.installed(model), lora.acting_on(gate(10)):
        expected = model(ids).logits
    merge_lora_inplace(model, lora.weights)
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-4, rtol=1e-4)


def test_quantized_weights_cannot_be_merged_into() -> None:
    model = copy.deepcopy(build("llama"))
    layer = model.model.layers[0].mlp.up_proj
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    with pytest.raises(UnsupportedError, match="up_proj is quantized"):
        merge_lora_inplace(model, random_lora("llama").weights)
