"""Supported values of `assistant=`, and the errors for all others."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    PreTrainedModel,
)

from hf_spec import AssistantError, OptionError, truncated_draft
from hf_spec.adapters.published import read_published
from hf_spec.generation.peft_type import SpecPeftConfig
from hf_spec.methods.loading import (
    adapter_module,
    build_published,
    cached_adapter,
    find_assistant,
)
from hf_spec.methods.registry import make_drafter, parse_strategy
from tests.adapters.samples import METHODS, sample
from tests.feature_reference import deepspec, medusa, speculator
from tests.published_heads import sample as published
from tests.refusals import refuse, small_llama
from tests.tiny_models import build, repetitive_prompt


@pytest.fixture
def target() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


class TestOwnLayers:
    """Assistants named `truncated:N`."""

    def test_they_are_cut_off_once(self, target: PreTrainedModel) -> None:
        cut, again, other = find_assistant(["truncated:2", "truncated:2", "a/b"], target, None)
        assert cut.config.num_hidden_layers == 2
        assert again is cut
        assert other == "a/b"

    @pytest.mark.parametrize("strategy", ["draft", "auto", "gsd"])
    def test_they_draft(self, target: PreTrainedModel, strategy: str) -> None:
        call = {"max_new_tokens": 12, "do_sample": False}
        given = {**call, "spec_strategy": strategy, "return_dict_in_generate": True}
        by_name, by_hand = (
            target.generate(repetitive_prompt(), **given, assistant=draft)
            for draft in ("truncated:2", truncated_draft(target, 2))
        )
        assert torch.equal(by_name.sequences, target.generate(repetitive_prompt(), **call))
        assert by_name.spec_stats.draft_forwards == by_hand.spec_stats.draft_forwards > 0

    @pytest.mark.parametrize("name", ["truncated:x", "truncated:", "truncated:-1", "truncated:3"])
    def test_layers_that_are_not_there(self, target: PreTrainedModel, name: str) -> None:
        match = "num_layers=3: .* 1 to 2" if name.endswith("3") else "with a number N"
        call = {"spec_strategy": "tree", "assistant": name}
        refuse(match, error=OptionError, model=target, **call)


# One per class of built heads.
HEADS = {
    "EagleHead": lambda: read_published(published("eagle3").folder),
    "Eagle1Head": lambda: read_published(published("eagle").folder),
    "BlockHead": deepspec,
    "MedusaHeads": medusa,
    "MlpSpeculator": speculator,
}


class TestBuiltHeads:
    """Heads that were built from their files in advance, for one target."""

    @pytest.mark.parametrize("kind", HEADS)
    def test_another_target_is_refused(self, kind: str) -> None:
        target = build("llama")
        head = build_published(HEADS[kind](), target)
        assert type(head).__name__ == kind
        call = {"error": AssistantError, "assistant": head}
        who = f"this {kind} was built for 'LlamaForCausalLM'"
        for strategy in (head.strategy, "auto"):
            call["spec_strategy"] = strategy
            refuse(rf"{who}; 'Qwen2.*' has .* other weights: build", model=build("qwen2"), **call)
        refuse(f"{who} with hidden_size 32; 'LlamaFor.*' has 16", model=small_llama(), **call)
        # A target with the same weights is accepted.
        assert make_drafter(parse_strategy(head.strategy), copy.deepcopy(target), head)


class TestAdapterObjects:
    """`SpecAdapter` objects in memory, and PEFT models that carry one."""

    @pytest.mark.parametrize("method", METHODS)
    def test_its_module_is_made_once_and_freezes_nothing(
        self, target: PreTrainedModel, method: str
    ) -> None:
        needed = [weight.requires_grad for weight in target.parameters()]
        module = cached_adapter(sample(method), target)
        assert cached_adapter(sample(method), target) is module
        assert [weight.requires_grad for weight in target.parameters()] == needed
        assert adapter_module(sample(method), method, target) is module
        other = "draft" if method == "falcon" else "falcon"
        with pytest.raises(AssistantError, match=f"method {method!r}, not {other!r}"):
            adapter_module(sample(method), other, target)
        assert cached_adapter(sample(method), target.to(torch.bfloat16)) is not module

    def test_damage_is_one_error(self, target: PreTrainedModel) -> None:
        whole = sample("falcon")
        for options in ({}, {"shape": 3}, {"shape": {"block_size": 2, "num_layers": 9}}):
            with pytest.raises(AssistantError, match="alcon adapter"):
                cached_adapter(replace(whole, options=options), target)

    def test_what_stands_for_one(self, target: PreTrainedModel) -> None:
        methods = ("falcon",)
        assert find_assistant(None, target, methods) is None
        for given in ("a/b", 3, target):
            assert find_assistant(given, target, methods) is given
        assert find_assistant([3, "a"], target, methods) == [3, "a"]
        lora = get_peft_model(copy.deepcopy(target), LoraConfig(target_modules=["q_proj"]))
        assert find_assistant(lora, target, methods) is lora
        config = SpecPeftConfig.of(sample("falcon"))
        carrier = PeftModel(copy.deepcopy(target), config)
        assert find_assistant(carrier, target, methods) is sample("falcon")
        assert find_assistant(None, carrier.get_base_model(), methods) is sample("falcon")
        assert find_assistant(None, carrier.get_base_model(), ("draft",)) is None
