"""Truncated drafts: shared modules that compute the same as a target truncated by hand."""

from __future__ import annotations

import copy
from operator import attrgetter
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec import OptionError, truncated_draft
from tests.tiny_models import VOCAB, build, repetitive_prompt

PROMPT = repetitive_prompt()
STACKS = {
    "llama": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gemma3": "model.layers",
}


def cut_by_hand(model: PreTrainedModel, stack: str, num_layers: int) -> PreTrainedModel:
    """Return a copy of the model with fewer layers."""
    cut = copy.deepcopy(model)
    holder, _, name = stack.rpartition(".")
    layers = attrgetter(stack)(cut)
    setattr(attrgetter(holder)(cut), name, nn.ModuleList(layers[:num_layers]))
    cut.config.num_hidden_layers = num_layers
    return cut


@torch.no_grad()
def logits(model: PreTrainedModel) -> Tensor:
    return model(PROMPT).logits


@pytest.mark.parametrize(
    ("name", "num_layers"), [("llama", 1), ("gpt2", 1), ("opt", 2), ("gemma3", 2)]
)
class TestEveryArchitecture:
    def test_it_computes_what_the_cut_target_computes(self, name: str, num_layers: int) -> None:
        model = build(name)
        draft = truncated_draft(model, num_layers)
        cut = cut_by_hand(model, STACKS[name], num_layers)
        assert torch.equal(logits(draft), logits(cut))
        assert not torch.equal(logits(draft), logits(model))
        options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
        assert torch.equal(draft.generate(PROMPT, **options), cut.generate(PROMPT, **options))

    def test_it_shares_every_parameter_and_buffer(self, name: str, num_layers: int) -> None:
        model = build(name)
        draft = truncated_draft(model, num_layers)
        own = {id(tensor) for tensor in [*model.parameters(), *model.buffers()]}
        assert {id(tensor) for tensor in [*draft.parameters(), *draft.buffers()]} <= own
        layers, shared = attrgetter(STACKS[name])(model), attrgetter(STACKS[name])(draft)
        assert len(shared) == num_layers
        assert all(a is b for a, b in zip(shared, layers, strict=False))
        assert draft.get_output_embeddings() is model.get_output_embeddings()

    def test_the_target_stays_as_it_was(self, name: str, num_layers: int) -> None:
        model = build(name)
        before, config = logits(model), model.config.to_dict()
        draft = truncated_draft(model, num_layers)
        assert torch.equal(logits(model), before)
        assert model.config.to_dict() == config
        assert len(attrgetter(STACKS[name])(model)) == model.config.num_hidden_layers == 3
        assert draft.config.num_hidden_layers == num_layers


@pytest.mark.parametrize("num_layers", [0, 3, -1, 1.5, "2", None])
def test_the_number_of_layers_is_checked(num_layers: Any) -> None:
    with pytest.raises(OptionError, match=r"has 3 layers, so a truncated draft has 1 to 2"):
        truncated_draft(build("llama"), num_layers)


def test_a_name_is_no_model() -> None:
    with pytest.raises(OptionError, match="model of type str: pass a loaded PreTrainedModel"):
        truncated_draft("my-model", 1)  # type: ignore[arg-type]


def test_a_model_without_one_stack_of_layers() -> None:
    model = copy.deepcopy(build("llama"))
    model.spare = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
    with pytest.raises(OptionError, match="has 2 lists of 3 layers"):
        truncated_draft(model, 1)


def test_layer_types_are_cut_too() -> None:
    draft = truncated_draft(build("gemma3"), 2)
    assert draft.config.layer_types == ["sliding_attention", "full_attention"]


def test_it_follows_changes_of_weights() -> None:
    model = copy.deepcopy(build("llama"))
    draft = truncated_draft(model, 2)
    before = logits(draft)
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight.mul_(0.5)
    assert torch.equal(logits(draft), before)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(0.5)
        model.lm_head.weight.mul_(2)
    assert not torch.equal(logits(draft), before)
    assert torch.equal(logits(draft), logits(cut_by_hand(model, "model.layers", 2)))


def test_its_settings_are_its_own() -> None:
    model = copy.deepcopy(build("llama"))
    draft = truncated_draft(model, 2)
    draft.generation_config.max_new_tokens = 3
    draft.config.use_cache = False
    assert model.generation_config.max_new_tokens != 3
    assert model.config.use_cache


@pytest.mark.parametrize("training", [True, False])
def test_the_mode_is_that_of_the_target(training: bool) -> None:
    model = copy.deepcopy(build("llama")).train(training)
    draft = truncated_draft(model, 2)
    assert {module.training for module in draft.modules()} == {training}
    assert model.training == training


class TestPeft:
    @staticmethod
    def adapted() -> Any:
        torch.manual_seed(0)
        config = LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, lora_alpha=16
        )
        return get_peft_model(copy.deepcopy(build("llama")), config).eval()

    def test_it_sees_the_adapters(self) -> None:
        model = self.adapted()
        draft = truncated_draft(model, 2)
        cut = cut_by_hand(model.get_base_model(), "model.layers", 2)
        assert torch.equal(logits(draft), logits(cut))
        with_adapters = logits(draft)
        with model.disable_adapter():
            bare = logits(draft)
        assert torch.equal(logits(draft), with_adapters)
        assert not torch.equal(bare, with_adapters)
        assert torch.equal(bare, logits(truncated_draft(build("llama"), 2)))

    def test_the_adapted_target_drafts_for_itself(self) -> None:
        model = self.adapted()
        options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False}
        expected = model.generate(input_ids=PROMPT, **options)
        got = model.generate(
            input_ids=PROMPT,
            **options,
            spec_strategy="draft",
            assistant=truncated_draft(model, 2),
        )
        assert torch.equal(got, expected)
        assert got.max() < VOCAB
