"""Draft models: models, folders and adapters, and the reason why anything else is rejected."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_spec import AssistantError
from hf_spec.adapters.folder import save_adapter
from hf_spec.methods.draft_model.loading import resolve_draft_model
from hf_spec.methods.draft_model.trained import TrainableDraft
from tests.tiny_models import VOCAB, build, repetitive_prompt

SMALL = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.fixture
def target() -> PreTrainedModel:
    return copy.deepcopy(build("llama"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    copy.deepcopy(build("llama", seed=1)).save_pretrained(tmp_path / "draft")
    return tmp_path / "draft"


def test_a_model_is_taken_as_it_is(target: PreTrainedModel) -> None:
    assistant = build("gpt2")
    assert resolve_draft_model("draft", assistant, target) is assistant


def test_the_target_itself(target: PreTrainedModel) -> None:
    assert resolve_draft_model("draft", target, target) is target


def test_a_peft_model_is_taken_with_its_adapters(target: PreTrainedModel) -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    adapted = get_peft_model(copy.deepcopy(build("llama")), config).eval()
    model = resolve_draft_model("draft", adapted, target)
    assert model is adapted.get_base_model()
    prompt = repetitive_prompt()
    with torch.no_grad():
        assert torch.equal(model(prompt).logits, adapted(prompt).logits)
        assert not torch.equal(model(prompt).logits, target(prompt).logits)


class TestFolder:
    @pytest.mark.parametrize("kind", [str, Path])
    def test_it_is_loaded_once_per_target(
        self, folder: Path, target: PreTrainedModel, kind: Any
    ) -> None:
        model = resolve_draft_model("draft", kind(folder), target)
        assert resolve_draft_model("tree", str(folder), target) is model
        assert resolve_draft_model("draft", folder, copy.deepcopy(target)) is not model
        assert not model.training
        saved = build("llama", seed=1).state_dict()
        assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())

    def test_it_takes_the_dtype_of_the_target(self, folder: Path, target: PreTrainedModel) -> None:
        model = resolve_draft_model("draft", folder, target.to(torch.bfloat16))
        assert model.dtype == torch.bfloat16

    def test_generate_takes_it(self, folder: Path, target: PreTrainedModel) -> None:
        options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
        expected = target.generate(repetitive_prompt(), **options)
        got = target.generate(
            repetitive_prompt(), **options, spec_strategy="tree", assistant=str(folder)
        )
        assert torch.equal(got, expected)

    def test_a_missing_folder(self, tmp_path: Path, target: PreTrainedModel) -> None:
        with pytest.raises(AssistantError, match=r"assistant='.*nowhere' cannot be loaded"):
            resolve_draft_model("draft", tmp_path / "nowhere", target)

    def test_a_folder_without_a_model(self, tmp_path: Path, target: PreTrainedModel) -> None:
        with pytest.raises(AssistantError, match="cannot be loaded"):
            resolve_draft_model("draft", tmp_path, target)

    def test_its_own_code_is_not_run(
        self, folder: Path, target: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nor is it asked on the terminal whether to."""
        config = json.loads((folder / "config.json").read_text())
        config |= {"model_type": "own", "auto_map": {"AutoConfig": "code.Config"}}
        (folder / "config.json").write_text(json.dumps(config))
        (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')")
        monkeypatch.setattr("builtins.input", lambda _: "y")
        with pytest.raises(AssistantError, match=r"(?s)cannot be loaded: .*custom code"):
            resolve_draft_model("draft", folder, target)
        assert not (folder / "ran").exists()

    def test_an_attempt_that_failed_is_repeated(
        self, folder: Path, target: PreTrainedModel
    ) -> None:
        elsewhere = folder.with_name("moved")
        with pytest.raises(AssistantError, match="cannot be loaded"):
            resolve_draft_model("draft", elsewhere, target)
        folder.rename(elsewhere)
        assert resolve_draft_model("draft", elsewhere, target).config.vocab_size == VOCAB


class TestRefusals:
    def test_nothing(self, target: PreTrainedModel) -> None:
        with pytest.raises(AssistantError, match="spec_strategy='tree' needs a draft model"):
            resolve_draft_model("tree", None, target)

    @pytest.mark.parametrize(
        "value", [3, object(), ["model"], torch.nn.Linear(2, 2), PreTrainedModel]
    )
    def test_a_wrong_kind(self, value: Any, target: PreTrainedModel) -> None:
        with pytest.raises(AssistantError, match="is not a draft model; pass a PreTrainedModel"):
            resolve_draft_model("draft", value, target)

    def test_an_encoder_decoder(self, target: PreTrainedModel) -> None:
        config = T5Config(vocab_size=VOCAB, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
        with pytest.raises(AssistantError, match=r"cannot draft: T5.* encoder-decoder"):
            resolve_draft_model("draft", T5ForConditionalGeneration(config), target)

    def test_a_model_without_a_head(self, target: PreTrainedModel) -> None:
        headless = LlamaModel(LlamaConfig(vocab_size=VOCAB, **SMALL))
        with pytest.raises(AssistantError, match="no language-model head"):
            resolve_draft_model("draft", headless, target)

    def test_another_vocabulary(self, target: PreTrainedModel) -> None:
        padded = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB + 128, **SMALL))
        assert resolve_draft_model("draft", padded, target) is padded
        other = LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB + 129, **SMALL))
        with pytest.raises(AssistantError, match="vocabulary has 226 tokens, the target's 97"):
            resolve_draft_model("draft", other, target)
        with pytest.raises(AssistantError, match="vocabulary has 97 tokens, the target's 226"):
            resolve_draft_model("draft", target, other)


class TestDraftAdapter:
    """A folder of this library: the target's first layers with what was trained."""

    @pytest.fixture
    def adapter(self, target: PreTrainedModel, tmp_path: Path) -> Path:
        draft = TrainableDraft(target, 2, 4, torch.arange(0, VOCAB, 2))
        save_adapter(tmp_path / "adapter", draft.to_adapter({}))
        return tmp_path / "adapter"

    def test_it_generates_through_generate(self, target: PreTrainedModel, adapter: Path) -> None:
        prompt = repetitive_prompt()
        options = {"max_new_tokens": 12, "do_sample": False}
        output = target.generate(
            prompt,
            **options,
            spec_strategy="tree",
            assistant=str(adapter),
            return_dict_in_generate=True,
        )
        assert torch.equal(output.sequences, target.generate(prompt, **options))
        assert output.spec_stats.drafted_tokens > 0

    def test_it_is_loaded_once_and_again_where_the_target_moves(
        self, target: PreTrainedModel, adapter: Path
    ) -> None:
        first = resolve_draft_model("draft", str(adapter), target)
        assert resolve_draft_model("draft", adapter, target) is first
        moved = resolve_draft_model("draft", adapter, target.to(torch.bfloat16))
        assert moved is not first
        assert moved.dtype == torch.bfloat16

    def test_another_target_is_refused(self, adapter: Path) -> None:
        with pytest.raises(AssistantError, match="other weights"):
            resolve_draft_model("draft", adapter, build("llama", seed=1))
