"""Targets and draft models that cannot be served are refused before the first forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T

from hf_spec import AssistantError, UnsupportedError
from hf_spec.execution.model_checks import check_model
from tests import hybrid_models
from tests.model_watch import count_forwards, snapshot
from tests.refusals import PROMPT, SMALL, minimax, model_without_head, refuse, rwkv, small_llama, t5
from tests.tiny_models import VOCAB, build, prompts, speculation


class TestModels:
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (t5, "T5ForConditionalGeneration is an encoder-decoder"),
            (rwkv, "RwkvForCausalLM has .* cannot take a rejected token back"),
            (minimax, "MiniMaxForCausalLM has .* cannot take a rejected token back"),
        ],
    )
    def test_state_that_cannot_be_rolled_back(self, make: Any, match: str) -> None:
        refuse(match, model=make())

    def test_a_state_beside_that_of_the_mixers(self) -> None:
        """As a second convolution in front of a layer, which nobody would take back."""
        model = copy.deepcopy(hybrid_models.build("lfm2"))
        check_model(model)
        model.model.layers[2].further = model.model.layers[0].conv
        check_model(model)
        model.model.layers[2].further = copy.deepcopy(model.model.layers[0].conv)
        with pytest.raises(UnsupportedError, match="Lfm2ForCausalLM has a recurrent state"):
            check_model(model)

    def test_prompt_learning_adapters(self) -> None:
        from peft import PromptTuningConfig, get_peft_model

        model = get_peft_model(
            small_llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        )
        with pytest.raises(UnsupportedError, match=r"prompt-learning adapters .* use LoRA"):
            model.generate(input_ids=PROMPT, spec_strategy="lookup", max_new_tokens=4)

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


class TestAssistants:
    @pytest.mark.parametrize(
        ("assistant", "match"),
        [
            (None, r"needs assistant=<model, folder or Hub id>.*truncated_draft"),
            (5, "assistant of type int is no draft model"),
            (T.LlamaConfig(**SMALL), "assistant of type LlamaConfig is no draft model"),
            (T.LlamaForCausalLM, "is no draft model"),
            (torch.nn.Linear(2, 2), "assistant of type Linear is no draft model"),
            ("/no/such/folder", "assistant='/no/such/folder' cannot be loaded"),
        ],
    )
    def test_no_model(self, assistant: Any, match: str) -> None:
        refuse(match, error=AssistantError, spec_strategy="draft", assistant=assistant)

    def test_another_vocabulary(self) -> None:
        refuse(
            f"the assistant's vocabulary has {2 * VOCAB + 50} tokens, the target's {VOCAB}",
            error=AssistantError,
            spec_strategy="tree",
            assistant=small_llama(vocab_size=2 * VOCAB + 50),
        )

    @pytest.mark.parametrize("make", [t5, rwkv, model_without_head])
    def test_a_model_that_cannot_draft(self, make: Any) -> None:
        refuse("the assistant ", error=AssistantError, spec_strategy="draft", assistant=make())

    def test_lookup_takes_none(self) -> None:
        refuse("takes no assistant", error=AssistantError, assistant=build("llama"))


def with_lora(name: str, **options: Any) -> Any:
    """A PEFT model with two adapters that change a lot."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    config = LoraConfig(r=2, init_lora_weights=False, task_type="CAUSAL_LM", **options)
    model = get_peft_model(copy.deepcopy(build(name)), config, adapter_name="one")
    model.add_adapter("two", copy.deepcopy(config))
    return model.eval()


class TestAdaptersOfARow:
    """`adapter_names=` and aLoRA: exact or refused, and the model is as it was."""

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
        with pytest.raises(UnsupportedError, match="aLoRA adapters begin at a place"):
            self.greedy(model, input_ids=ids, spec_strategy="lookup")
        assert snapshot(model.get_base_model()) == before
        # Without its tokens the adapter does nothing.
        other = ids[:, ids[0] != ids[0, 30]]
        drafted = self.greedy(model, input_ids=other, spec_strategy="lookup")
        assert drafted == self.greedy(model, input_ids=other)
