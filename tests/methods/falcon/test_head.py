"""The Falcon head: inputs that its outputs depend on, mixers, and adapters."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_spec import AssistantError, OptionError, UnsupportedError
from hf_spec.adapters.folder import load_adapter, save_adapter
from hf_spec.methods.falcon.head import FalconHead, FalconShape, block_mask
from tests.falcon_reference import random_head
from tests.tiny_models import VOCAB, build

ARCHITECTURES = ["llama", "gemma3", "qwen2", "gpt_neox", "mistral"]
LENGTH = 7


def pairs(seed: int = 0, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (1, length), generator=generator)
    return tokens, torch.randn(1, length, 32, generator=generator)


def block_of(pair: int, size: int, grid: int) -> int:
    return (pair - grid) // size


class TestLeakage:
    """Output i predicts h_{i+k}. Pair j holds h_j and t_{j+1}; i sees no pair of a later block."""

    @pytest.mark.parametrize(("size", "recurrent"), [(1, False), (2, True), (3, False), (4, True)])
    def test_no_output_depends_on_a_later_block(self, size: int, recurrent: bool) -> None:
        head = random_head("llama", size, recurrent=recurrent)
        for grid in range(size):
            tokens, features = pairs()
            features.requires_grad_(True)
            outputs = head(tokens, features, grid)
            for i in range(LENGTH):
                gradient = torch.autograd.grad(
                    outputs[0, i].square().sum(), features, retain_graph=True
                )
                used = gradient[0][0].abs().sum(dim=-1) > 0
                seen = [block_of(j, size, grid) <= block_of(i, size, grid) for j in range(LENGTH)]
                assert used.tolist() == seen
                # Pair i + k contains the label h_{i+k} and t_{i+k+1}.
                assert not used[i + size :].any()

    @pytest.mark.parametrize("name", ARCHITECTURES)
    def test_a_token_changes_no_output_before_its_block(self, name: str) -> None:
        head = random_head(name, 3)
        tokens, features = pairs()
        for grid in range(3):
            before = head(tokens, features, grid)
            for j in range(LENGTH):
                other = tokens.clone()
                other[0, j] = (other[0, j] + 1) % VOCAB
                changed = (head(other, features, grid) - before)[0].abs().sum(dim=-1) > 0
                seen = [block_of(j, 3, grid) <= block_of(i, 3, grid) for i in range(LENGTH)]
                assert changed.tolist() == seen

    @pytest.mark.parametrize("name", ["mistral_sliding", "gemma3", "gpt_oss"])
    def test_windows_hold(self, name: str) -> None:
        """The head has one layer, with a sliding window, so nothing arrives through others."""
        head = random_head(name, 2, num_layers=1)
        tokens, features = pairs(length=14)
        features.requires_grad_(True)
        output = head(tokens, features)[0, 13].square().sum()
        used = torch.autograd.grad(output, features)[0][0].abs().sum(dim=-1) > 0
        assert used.tolist() == [j > 13 - 8 for j in range(14)]

    @pytest.mark.parametrize(
        ("size", "grid", "recurrent"),
        [(1, 0, True), (2, 0, False), (2, 1, True), (3, 2, False)],
    )
    def test_one_masked_pass_is_a_pass_per_block(
        self, size: int, grid: int, recurrent: bool
    ) -> None:
        """Outputs and gradients of whole texts equal those of blocks drafted one by one."""
        head = random_head("llama", size, recurrent=recurrent)
        tokens, features = pairs(length=11)
        parameters = [weight.requires_grad_() for weight in head.trained().values()]
        whole = head(tokens, features, grid)
        found = torch.autograd.grad(whole.square().sum(), parameters)
        ends = sorted({*range(grid or size, 11, size), 11})
        last = [
            head(tokens[:, :end], features[:, :end], grid)[:, start:]
            for start, end in zip([0, *ends], ends, strict=False)
        ]
        apart = torch.cat(last, dim=1)
        torch.testing.assert_close(apart, whole, atol=1e-5, rtol=1e-4)
        expected = torch.autograd.grad(apart.square().sum(), parameters)
        for mine, other in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-3, rtol=1e-3)

    def test_block_mask(self) -> None:
        assert block_mask(5, 2, 1).int().tolist() == [
            [1, 0, 0, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 0, 0],
            [1, 1, 1, 1, 1],
            [1, 1, 1, 1, 1],
        ]
        assert torch.equal(block_mask(6, 1), torch.ones(6, 6).tril().bool())


class TestMixers:
    def test_per_pair_is_an_lstm_from_zero_state(self) -> None:
        head = random_head("llama", 2)
        size = head.hidden_size
        lstm = nn.LSTM(2 * size, size, num_layers=2, batch_first=True)
        with torch.no_grad():
            for layer, gates in enumerate(head.mixer.gates):
                rows = torch.cat([torch.arange(size), torch.arange(2 * size, 4 * size)])
                weight, _, bias, other = lstm.all_weights[layer]
                weight[rows], bias[rows] = gates.weight, gates.bias
                other.zero_()
        inputs = torch.randn(1, 5, 2 * size)
        expected = torch.cat([lstm(inputs[:, i : i + 1])[0] for i in range(5)], dim=1)
        torch.testing.assert_close(head.mixer(inputs)[0], expected, atol=1e-6, rtol=1e-5)

    @pytest.mark.parametrize("cut", [1, 3, 6])
    def test_a_state_carries_on(self, cut: int) -> None:
        head = random_head("llama", 2, recurrent=True)
        tokens, features = pairs()
        whole, end = head.mix(tokens, features)
        first, state = head.mix(tokens[:, :cut], features[:, :cut])
        second, other = head.mix(tokens[:, cut:], features[:, cut:], state)
        torch.testing.assert_close(torch.cat([first, second], dim=1), whole)
        assert end is not None
        assert other is not None
        torch.testing.assert_close(other, end)

    def test_recurrent_reads_along_the_text_not_across_the_batch(self) -> None:
        head = random_head("llama", 2, recurrent=True)
        tokens, features = pairs(length=4)
        double = head.mix(tokens.repeat(2, 1), features.repeat(2, 1, 1))[0]
        torch.testing.assert_close(double[0], double[1])
        alone = head.mix(tokens[:, 2:], features[:, 2:])[0]
        assert not torch.allclose(double[:1, 2:], alone, atol=1e-3)

    def test_one_token_a_block_is_eagle(self) -> None:
        """With k = 1, a causal model over (token i + 1, feature i) predicts feature i + 1."""
        head = random_head("llama", 1)
        tokens, features = pairs()
        mixed, _ = head.mix(tokens, features)
        causal = head.attention(inputs_embeds=mixed, use_cache=False)[0]
        torch.testing.assert_close(head(tokens, features), causal, atol=1e-5, rtol=1e-4)


class TestAdapter:
    @pytest.mark.parametrize(
        ("fused", "recurrent", "mlp_size", "vocabulary"),
        [
            (False, False, None, None),
            (True, False, 5, torch.tensor([2, 5, 11, 40])),
            (False, True, None, torch.tensor([2, 5, 11, 40])),
            (True, True, None, None),
        ],
    )
    def test_save_and_load(
        self,
        tmp_path: Path,
        fused: bool,
        recurrent: bool,
        mlp_size: int | None,
        vocabulary: Any,
    ) -> None:
        model = build("llama")
        shape = FalconShape(3, 1, recurrent, fused, mlp_size)
        head = FalconHead(model, shape, vocabulary).eval()
        with torch.no_grad():
            if head.earlier is not None:
                head.earlier.up.weight.normal_()
            for parameter in head.trained().values():
                parameter.copy_(parameter.bfloat16())
        save_adapter(tmp_path, head.to_adapter({"max_depth": 6}))
        loaded = FalconHead.from_adapter(load_adapter(tmp_path, "falcon"), model)
        assert loaded.shape == head.shape
        assert loaded.options["max_depth"] == 6
        assert not loaded.training
        tokens, features = pairs()
        torch.testing.assert_close(loaded(tokens, features), head(tokens, features))
        hidden = head(tokens, features)
        torch.testing.assert_close(loaded.head(hidden), head.head(hidden))
        states = torch.randn(len(head.hidden_layers), 5, head.hidden_size).unbind()
        torch.testing.assert_close(loaded.fuse(states), head.fuse(states))
        assert torch.equal(loaded.fuse(states), states[-1]) != fused

    def test_only_its_own_weights_are_stored(self) -> None:
        head = random_head("llama")
        shared = {id(p) for p in build("llama").parameters()}
        assert not shared & {id(p) for p in head.trained().values()}
        assert not [name for name in head.trained() if "embed" in name or "head." in name]

    @pytest.mark.parametrize(
        ("change", "match"),
        [
            ({"hidden_size": 48}, "hidden_size 48"),
            ({"vocab_size": 98}, "vocab_size 98"),
            ({"fingerprint": (9.0,) * 32}, "other weights"),
        ],
    )
    def test_another_base_is_refused(self, change: dict[str, Any], match: str) -> None:
        adapter = random_head("llama").to_adapter({})
        other = replace(adapter, base=replace(adapter.base, **change))
        with pytest.raises(AssistantError, match=match):
            FalconHead.from_adapter(other, build("llama"))

    def test_damaged_adapters_are_refused(self) -> None:
        adapter = random_head("llama").to_adapter({})
        missing = dict(list(adapter.tensors.items())[1:])
        for damaged in (
            replace(adapter, options={}),
            replace(adapter, options={"shape": {"block_size": 7}}),
            replace(adapter, options={"shape": {"depth": 7}}),
            replace(adapter, tensors=missing),
            replace(adapter, tensors={**adapter.tensors, "odd": torch.zeros(3)}),
        ):
            with pytest.raises(AssistantError, match=r"shape|own config"):
                FalconHead.from_adapter(damaged, build("llama"))

    @pytest.mark.parametrize("shape", [{"block_size": 5}, {"block_size": 0}, {"num_layers": 0}])
    def test_shapes(self, shape: dict[str, int]) -> None:
        with pytest.raises(OptionError, match=next(iter(shape))):
            FalconShape(**shape)

    def test_the_strongest_neurons_are_kept(self) -> None:
        model = copy.deepcopy(build("llama"))
        mlp, width = model.model.layers[-1].mlp, model.config.intermediate_size
        strongest = [1, 4, width - 1]
        with torch.no_grad():
            for weight in (mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.T):
                weight[strongest] *= 10
        head = FalconHead(model, FalconShape(mlp_size=3), None)
        kept = head.attention.layers[0].mlp
        assert torch.equal(kept.gate_proj.weight, mlp.gate_proj.weight[strongest])
        assert torch.equal(kept.up_proj.weight, mlp.up_proj.weight[strongest])
        assert torch.equal(kept.down_proj.weight, mlp.down_proj.weight[:, strongest])
        assert model.config.intermediate_size == width

    def test_more_neurons_than_the_target(self) -> None:
        with pytest.raises(OptionError, match="mlp_size=999: the target's MLPs have only"):
            FalconHead(build("llama"), FalconShape(mlp_size=999), None)

    def test_other_mlps_are_not_narrowed(self) -> None:
        with pytest.raises(UnsupportedError, match="mlp_size=3: GPTNeoXMLP is not a gated MLP"):
            FalconHead(build("gpt_neox"), FalconShape(mlp_size=3), None)

    def test_more_layers_than_the_target(self) -> None:
        with pytest.raises(OptionError, match="has only 3 layers"):
            FalconHead(build("llama"), FalconShape(2, 4), None)

    def test_fewer_layers_than_are_fused(self) -> None:
        model = build("llama")
        config = copy.deepcopy(model.config)
        config.num_hidden_layers = 2
        with pytest.raises(OptionError, match="fused=True: the 2 layers of LlamaForCausalLM"):
            FalconHead(type(model)(config), FalconShape(1, fused=True), None)

    def test_the_target_is_left_as_it_was(self) -> None:
        model = copy.deepcopy(build("gemma3"))
        before = {name: p.clone() for name, p in model.named_parameters()}
        layers = [module.layer_idx for module in model.modules() if hasattr(module, "layer_idx")]
        kinds = list(model.config.layer_types)
        head = FalconHead(model, FalconShape(2, 1), None)
        with torch.no_grad():
            for parameter in head.trained().values():
                parameter.zero_()
        assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
        assert layers == [m.layer_idx for m in model.modules() if hasattr(m, "layer_idx")]
        assert model.config.layer_types == kinds
