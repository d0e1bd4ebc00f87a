"""Checks of the target: training mode, quantization, adapters per row, lengths."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_spec import UnsupportedError
from hf_spec.generation.target_checks import check_input_scales
from tests import any_class
from tests.model_watch import count_forwards, snapshot
from tests.refusals import PROMPT, refuse, small_llama
from tests.tiny_models import build, prompts, speculation


class TestTraining:
    def test_training_mode_with_dropout(self) -> None:
        refuse(
            r"training mode .*attention_dropout.* model.eval\(\)",
            model=small_llama(attention_dropout=0.1).train(),
        )
        model = copy.deepcopy(build("gpt2")).train()
        refuse(r"model.eval\(\)", model=model)

    def test_training_mode_with_gradient_checkpointing(self) -> None:
        model = small_llama().train()
        for module in model.modules():
            if hasattr(module, "gradient_checkpointing"):
                module.gradient_checkpointing = True
        refuse("gradient checkpointing", model=model)

    def test_training_mode_without_dropout_is_served(self) -> None:
        model = small_llama().train()
        plain = model.generate(PROMPT, max_new_tokens=8)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=8, spec_strategy="lookup"), plain)
        assert model.training


def quantized(dtype: torch.dtype) -> Any:
    """Return a model whose linear layers are dynamically quantized."""
    from torch.ao.quantization import quantize_dynamic

    # PyTorch warns that torchao will replace this function.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return quantize_dynamic(build("llama"), {torch.nn.Linear}, dtype=dtype)


class TestQuantizeDynamic:
    def test_one_scale_for_all_tokens_of_a_forward(self) -> None:
        """A token's output changes if another token in the forward pass is large."""
        model = quantized(torch.qint8)
        layer = model.model.layers[0].mlp.up_proj
        states = torch.randn(2, 32, generator=torch.Generator().manual_seed(0))
        states[1] *= 50
        alone, beside = layer(states[:1]), layer(states)[:1]
        assert (alone - beside).norm() > 0.1 * alone.norm()
        refuse(r"model\.layers\.0\..* of LlamaForCausalLM .* one scale", model=model)
        with pytest.raises(UnsupportedError, match="with one scale"):
            model.generate_batch([[3, 4, 5]], spec_strategy="lookup", max_new_tokens=4)

    def test_half_precision_keeps_tokens_apart(self) -> None:
        model = quantized(torch.float16)
        call = {**prompts("llama", "one"), "max_new_tokens": 30, "do_sample": False}
        assert torch.equal(model.generate(**call, spec_strategy="lookup"), model.generate(**call))

    def test_as_a_draft_model(self) -> None:
        target, call = build("llama"), {"max_new_tokens": 30, "do_sample": False}
        call |= prompts("llama", "one")
        drafted = target.generate(**call, spec_strategy="tree", assistant=quantized(torch.qint8))
        assert torch.equal(drafted, target.generate(**call))


class PerTensor:
    """Stand-in for the granularity of torchao with this name: one scale for a whole tensor."""


class PerRow:
    """Stand-in for the granularity of torchao with this name: one scale per token."""


def with_input_scales(act_quant_scale: Any = None, **settings: Any) -> Any:
    """Return a model with a weight that has the attributes of torchao's."""
    model = small_llama()
    weight: Any = model.model.layers[1].mlp.up_proj.weight
    weight.act_quant_kwargs = SimpleNamespace(**settings)
    weight.act_quant_scale = act_quant_scale
    return model


class TestTorchao:
    @pytest.mark.parametrize(
        ("settings", "remedy"),
        [
            ({"granularity": PerTensor()}, r"granularity=PerRow\(\)"),
            ({"use_dynamic_per_tensor_scale": True}, "use_dynamic_per_tensor_scale=False"),
        ],
    )
    def test_one_scale_for_all_tokens_of_a_forward(self, settings: Any, remedy: str) -> None:
        model = with_input_scales(**settings)
        match = rf"model\.layers\.1\.mlp\.up_proj of LlamaForCausalLM .* one scale.* {remedy}"
        refuse(match, model=model)
        with pytest.raises(UnsupportedError, match=match):
            model.generate_batch([[3, 4, 5]], spec_strategy="lookup", max_new_tokens=4)

    @pytest.mark.parametrize(
        "settings",
        [
            {"granularity": PerRow()},
            {"granularity": PerTensor(), "act_quant_scale": torch.ones(())},
            {"use_dynamic_per_tensor_scale": False},
        ],
    )
    def test_scales_of_each_token_and_fixed_ones_keep_tokens_apart(self, settings: Any) -> None:
        model = with_input_scales(**settings)
        plain = model.generate(PROMPT, max_new_tokens=8)
        assert torch.equal(model.generate(PROMPT, max_new_tokens=8, spec_strategy="lookup"), plain)

    def test_as_a_draft_model(self) -> None:
        target, draft = small_llama(), with_input_scales(granularity=PerTensor())
        plain = target.generate(PROMPT, max_new_tokens=8)
        drafted = target.generate(PROMPT, max_new_tokens=8, spec_strategy="draft", assistant=draft)
        assert torch.equal(drafted, plain)

    def test_of_torchao_itself(self) -> None:
        """The attributes and class names that are read are those of torchao."""
        granularity = pytest.importorskip("torchao.quantization.granularity")
        weights = pytest.importorskip("torchao.quantization.quantize_.workflows")
        for kind in (granularity.PerTensor, granularity.PerRow):
            settings = weights.QuantizeTensorToFloat8Kwargs(granularity=kind())
            dense = torch.randn(32, 16, dtype=torch.bfloat16)
            weight = weights.Float8Tensor.from_hp(
                dense, granularity=kind(), act_quant_kwargs=settings
            )
            model = torch.nn.Sequential(torch.nn.Linear(16, 32))
            model[0].weight = torch.nn.Parameter(weight, requires_grad=False)
            if kind is granularity.PerRow:
                check_input_scales(model)  # type: ignore[arg-type]
                continue
            with pytest.raises(UnsupportedError, match="one scale"):
                check_input_scales(model)  # type: ignore[arg-type]


def with_lora(name: str, **options: Any) -> Any:
    """Return a PEFT model with two adapters that change its output a lot."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    model = get_peft_model(copy.deepcopy(build(name)), config, adapter_name="one")
    model.add_adapter("two", copy.deepcopy(config))
    return model.eval()


class TestAdaptersOfARow:
    """`adapter_names=` and aLoRA are exact or rejected, and the model is unchanged."""

    NAMES = ("two", "one", "__base__", "two", "one")

    def greedy(self, model: Any, **call: Any) -> list[list[int]]:
        return model.generate(max_new_tokens=12, do_sample=False, **call).tolist()

    @pytest.mark.parametrize("name", ["one", "two", "__base__"])
    @pytest.mark.parametrize("strategy", ["lookup", "draft"])
    def test_of_a_single_row(self, name: str, strategy: str) -> None:
        model = with_lora("llama")
        call = {**prompts("llama", "one"), "adapter_names": [name]}
        drafted = self.greedy(model, **call, **speculation("llama", strategy))
        assert drafted == self.greedy(model, **call)

    def test_of_several_rows_where_inputs_are_padded_anyway(self) -> None:
        model = with_lora("bloom")
        call = {**prompts("bloom", "ragged"), "adapter_names": list(self.NAMES)}
        plain = self.greedy(model, **call)
        assert plain != self.greedy(model, **prompts("bloom", "ragged"))
        assert self.greedy(model, **call, spec_strategy="lookup") == plain

    def test_of_several_rows(self) -> None:
        model = with_lora("llama")
        inner = model.get_base_model()
        call = prompts("llama", "ragged")
        plain = self.greedy(model, **call)
        before = snapshot(inner)
        match = r"adapter_names=\['two', .* model.set_adapter\(name\)"
        with count_forwards(inner) as forwards, pytest.raises(UnsupportedError, match=match):
            self.greedy(model, **call, adapter_names=list(self.NAMES), spec_strategy="lookup")
        assert forwards == []
        assert snapshot(inner) == before
        assert self.greedy(model, **call, spec_strategy="lookup") == plain

    def test_that_begin_inside_the_text(self) -> None:
        ids = prompts("llama", "one")["input_ids"]
        model = with_lora("llama", alora_invocation_tokens=ids[0, 30:32].tolist())
        assert self.greedy(model, input_ids=ids) != self.greedy(build("llama"), input_ids=ids)
        before = snapshot(model.get_base_model())
        with pytest.raises(UnsupportedError, match="aLoRA adapters begin at a position"):
            self.greedy(model, input_ids=ids, spec_strategy="lookup")
        assert snapshot(model.get_base_model()) == before
        # Without its invocation tokens the adapter is inactive.
        other = ids[:, ids[0] != ids[0, 30]]
        drafted = self.greedy(model, input_ids=other, spec_strategy="lookup")
        assert drafted == self.greedy(model, input_ids=other)


INDEXED = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    # Some of its layers reuse the token selection of an earlier layer.
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def test_rotary_scaling_that_depends_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = small_llama(rope_parameters=rope, max_position_embeddings=32)
    refuse("rope_type='dynamic' .* past 32 tokens", model=model, max_new_tokens=30)
    model.generate(PROMPT, max_new_tokens=4, spec_strategy="lookup")


@pytest.mark.parametrize("kind", INDEXED)
def test_an_index_that_leaves_tokens_out(kind: str) -> None:
    model = any_class.build(kind, INDEXED[kind])
    assert model.config.get_text_config().index_topk == 64
    room = 64 - PROMPT.shape[1]
    refuse("at most 64 tokens", model=model, max_new_tokens=room + 1)
    call = {"max_new_tokens": room, "do_sample": False}
    plain = model.generate(PROMPT, **call)
    assert torch.equal(model.generate(PROMPT, **call, spec_strategy="lookup"), plain)
