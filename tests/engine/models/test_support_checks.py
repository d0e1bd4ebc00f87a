"""Unsupported targets and draft models raise an error before the first forward pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers as T

from hf_spec import AssistantError, UnsupportedError
from hf_spec.engine.models.support_checks import check_model
from tests import hybrid_models
from tests.refusals import PROMPT, SMALL, minimax, model_without_head, refuse, rwkv, small_llama, t5
from tests.tiny_models import VOCAB, build


class TestModels:
    @pytest.mark.parametrize(
        ("make", "match"),
        [
            (t5, "T5ForConditionalGeneration is an encoder-decoder"),
            (rwkv, "RwkvForCausalLM has .* cannot be rolled back after a rejected token"),
            (minimax, "MiniMaxForCausalLM has .* cannot be rolled back after a rejected token"),
        ],
    )
    def test_state_that_cannot_be_rolled_back(self, make: Any, match: str) -> None:
        refuse(match, model=make())

    def test_a_state_beside_that_of_the_mixers(self) -> None:
        """A second convolution in front of a layer would not be rolled back."""
        model = copy.deepcopy(hybrid_models.build("lfm2"))
        check_model(model)
        model.model.layers[2].further = model.model.layers[0].conv
        check_model(model)
        model.model.layers[2].further = copy.deepcopy(model.model.layers[0].conv)
        with pytest.raises(
            UnsupportedError, match="Lfm2ForCausalLM has an unknown recurrent state"
        ):
            check_model(model)

    def test_no_weights(self) -> None:
        model = small_llama().to("meta")
        with pytest.raises(UnsupportedError, match=r"on the device 'meta'.*from_pretrained"):
            model.generate(torch.ones(1, 3, dtype=torch.long), spec_strategy="lookup")
        refuse("on the device 'meta'", spec_strategy="draft", assistant=model)

    def test_prompt_learning_adapters(self) -> None:
        from peft import PromptTuningConfig, get_peft_model

        model = get_peft_model(
            small_llama(), PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
        )
        with pytest.raises(UnsupportedError, match=r"prompt-learning adapters .* use LoRA"):
            model.generate(input_ids=PROMPT, spec_strategy="lookup", max_new_tokens=4)


class TestAssistants:
    @pytest.mark.parametrize(
        ("assistant", "match"),
        [
            (None, r"needs assistant=<model, folder or Hub id>.*truncated_draft"),
            (5, "assistant of type int is not a draft model"),
            (T.LlamaConfig(**SMALL), "assistant of type LlamaConfig is not a draft model"),
            (T.LlamaForCausalLM, "is not a draft model"),
            (torch.nn.Linear(2, 2), "assistant of type Linear is not a draft model"),
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
