"""Unsupported targets and draft models raise an error before the first forward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as T
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hf_spec import AssistantError, UnsupportedError
from hf_spec.common.logging import log_once
from hf_spec.engine.models import support_checks
from hf_spec.engine.models.support_checks import check_attention_function, check_model
from tests import hybrid_models
from tests.refusals import PROMPT, SMALL, minimax, model_without_head, refuse, rwkv, small_llama, t5
from tests.tiny_models import VOCAB, build, settled_prompt


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


def flat_attention(*args: Any, scaling: float | None = None, **options: Any) -> Any:
    """Attend with flatter probabilities than the model's own."""
    return sdpa_attention_forward(*args, scaling=0.05, **options)


def all_to_all(**_: Any) -> None:
    """Mask nothing."""


class TestAttentionFunctions:
    @pytest.fixture
    def register(self, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
        def add(name: str, attention: Any = flat_attention, mask: Any = sdpa_mask) -> Any:
            """Return a model that attends by these functions, which are removed after the test."""
            monkeypatch.setitem(T.AttentionInterface._global_mapping, name, attention)
            monkeypatch.setitem(T.AttentionMaskInterface._global_mapping, name, mask)
            model = copy.deepcopy(build("llama"))
            model.config._attn_implementation_internal = name
            return model

        return add

    @pytest.mark.parametrize(
        ("name", "functions", "remedy"),
        [
            ("mine", {}, "sdpa"),
            ("mine", {"attention": partial(flat_attention)}, "sdpa"),
            ("mine", {"attention": sdpa_attention_forward, "mask": all_to_all}, "sdpa"),
            ("sdpa", {}, "eager"),
            ("eager", {}, "sdpa"),
            ("someone/kernels:flat_attention", {}, "sdpa"),
        ],
    )
    def test_of_a_user(
        self, name: str, functions: Any, remedy: str, register: Callable[..., Any]
    ) -> None:
        model = register(name, **functions)
        match = rf"attn_implementation='{name}' .*model\.set_attn_implementation\(\"{remedy}\"\)"
        for strategy in ("lookup", "none"):
            refuse(match, model=model, spec_strategy=strategy)
        with pytest.raises(UnsupportedError, match=match):
            model.generate_batch([[3, 4, 5]], spec_strategy="lookup", max_new_tokens=4)

    def test_another_one_instead(self, register: Callable[..., Any]) -> None:
        model, call = register("mine"), {"max_new_tokens": 12, "do_sample": False}
        ids = settled_prompt("llama")
        other = model.generate(ids, **call)
        model.set_attn_implementation("sdpa")
        plain = model.generate(ids, **call)
        assert not torch.equal(plain, other)
        assert torch.equal(model.generate(ids, **call, spec_strategy="lookup"), plain)

    @pytest.mark.parametrize("strategy", ["draft", "tree"])
    def test_of_a_draft_model(self, strategy: str, register: Callable[..., Any]) -> None:
        target, draft = build("llama"), register("mine")
        call: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
        ids = settled_prompt("llama")
        drafted = target.generate(ids, **call, spec_strategy=strategy, assistant=draft)
        assert torch.equal(drafted, target.generate(ids, **call))

    @pytest.mark.parametrize(
        "name",
        [
            *(None, "eager", "sdpa", "flex_attention", "paged|eager", "paged|sdpa"),
            *("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn2"),
        ],
    )
    def test_of_transformers(self, name: str | None) -> None:
        model = copy.deepcopy(build("llama"))
        model.config._attn_implementation_internal = name
        check_attention_function(model)

    def test_a_function_of_transformers_by_another_name(self, register: Callable[..., Any]) -> None:
        for name in ("alias", "someone/kernels:flash"):
            check_attention_function(register(name, sdpa_attention_forward))

    def test_of_the_text_model_inside(self, register: Callable[..., Any]) -> None:
        model = register("mine")
        text = model.config
        # Composite configs store the attention of each part.
        model.config = T.LlamaConfig(**SMALL)
        model.config.get_text_config = lambda *_, **__: text
        with pytest.raises(UnsupportedError, match="attn_implementation='mine'"):
            check_attention_function(model)


class OwnInputs(T.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, *args: Any, **inputs: Any) -> Any:
        return super().prepare_inputs_for_generation(*args, **inputs)


class OwnLoop(OwnInputs):
    def _sample(self, *args: Any, **inputs: Any) -> Any:
        return super()._sample(*args, **inputs)


class TestOverrides:
    """Methods of a user's class that are not called are logged, once per class."""

    @pytest.mark.parametrize(
        ("kind", "methods"),
        [
            (T.LlamaForCausalLM, None),
            (OwnInputs, "prepare_inputs_for_generation()"),
            (OwnLoop, "prepare_inputs_for_generation() and _sample()"),
        ],
    )
    def test_said_once(
        self, kind: Any, methods: str | None, caplog: pytest.LogCaptureFixture
    ) -> None:
        log_once.cache_clear()
        for _ in range(2):
            model = kind(T.LlamaConfig(**SMALL)).eval()
            model.generate(PROMPT, max_new_tokens=3, spec_strategy="lookup")
        ours = [record for record in caplog.records if record.name == support_checks.__name__]
        assert len(ours) == (0 if methods is None else 1)
        for record in ours:
            name = f"{kind.__module__}.{kind.__qualname__}"
            assert record.levelname == "WARNING"
            assert f"spec_strategy does not call {methods} of {name}" in record.getMessage()


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
