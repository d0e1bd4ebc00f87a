"""Loading of draft models and of the tokenizers of a call, and rejected values."""

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

import hf_spec
from hf_spec import (
    AssistantError,
    DiscoConfig,
    DraftConfig,
    OptionError,
    TreeConfig,
    UnsupportedError,
)
from hf_spec.adapters.folder import save_adapter
from hf_spec.methods.draft_model.loading import LoadedDraft, find_draft, resolve_draft_model
from hf_spec.methods.draft_model.trained import TrainableDraft
from tests.other_tokenizers import batch, bpe, learned, random_model, unigram, wordpiece
from tests.tiny_models import VOCAB, build, disco_adapter, repetitive_prompt

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
        """There is no prompt on the terminal either."""
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
    """Folders of this library: trained weights for the target's first layers."""

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


BOTH = {"tokenizer": bpe(), "assistant_tokenizer": unigram()}


def generate(**options: Any) -> Any:
    return learned("bpe").generate(
        **batch(), max_new_tokens=6, return_dict_in_generate=True, **options
    )


def refused(error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        generate(**{"spec_strategy": "draft", "assistant": learned("unigram"), **options})


class TestTokenizerRefusals:
    def test_one_tokenizer(self) -> None:
        refused(OptionError, "pass tokenizer=", assistant_tokenizer=unigram())
        refused(
            AssistantError, "both tokenizers: tokenizer=, assistant_tokenizer=", tokenizer=bpe()
        )

    def test_a_tokenizer_of_another_model(self) -> None:
        options = {**BOTH, "assistant_tokenizer": bpe()}
        refused(OptionError, "assistant_tokenizer= has 310 tokens and its model", **options)
        options = {**BOTH, "tokenizer": unigram()}
        refused(OptionError, "tokenizer= has 57 tokens and its model 310", **options)

    @pytest.mark.parametrize("strategy", ["lookup", "none", "falcon", "sdsat"])
    def test_strategies_without_a_draft_model(self, strategy: str) -> None:
        match = f"assistant_tokenizer= cannot be combined with spec_strategy='{strategy}'"
        refused(UnsupportedError, match, **BOTH, spec_strategy=strategy)

    def test_several_assistants(self) -> None:
        several = [learned("unigram"), learned("bpe")]
        refused(AssistantError, "has 2; pass one", **BOTH, spec_strategy="auto", assistant=several)
        refused(AssistantError, "has none", **BOTH, spec_strategy="auto", assistant=None)

    def test_a_classifier_without_its_name(self) -> None:
        refused(AssistantError, "DiscoConfig\\(adapter=", **BOTH, spec_strategy="disco")

    def test_no_assistant(self) -> None:
        refused(AssistantError, "needs assistant=", **BOTH, assistant=None)

    def test_translation(self) -> None:
        with pytest.raises(OptionError, match="translation='words'; known: shared, text"):
            DraftConfig(translation="words")


def test_without_a_strategy_they_are_transformers_own() -> None:
    prompt = batch()["input_ids"][1:2]
    plain = learned("bpe").generate(prompt, max_new_tokens=6)
    drafted = learned("bpe").generate(
        prompt, max_new_tokens=6, assistant_model=learned("unigram"), **BOTH
    )
    assert torch.equal(drafted, plain)


def test_equal_tokenizers_are_one() -> None:
    other: Any = bpe.__wrapped__()
    options = {"assistant": learned("bpe"), "tokenizer": bpe(), "assistant_tokenizer": other}
    found = generate(spec_strategy=DraftConfig(max_draft_tokens=5), **options)
    assert found.spec_stats.drafted_tokens == found.spec_stats.accepted_tokens > 0


def test_stop_strings_use_the_same_tokenizer() -> None:
    options = {"stop_strings": [" lazy"], "tokenizer": bpe()}
    plain = learned("bpe").generate(**batch(), max_new_tokens=30, **options)
    found = learned("bpe").generate(
        **batch(),
        max_new_tokens=30,
        **options,
        spec_strategy="draft",
        assistant=learned("unigram"),
        assistant_tokenizer=unigram(),
    )
    assert torch.equal(found, plain)


def test_disco_with_a_draft_model_of_another_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_spec.adapters.folder import BaseModel

    monkeypatch.setattr(BaseModel, "check", lambda *_: None)
    config = DiscoConfig(adapter=disco_adapter("llama"), acceptance_threshold=0.0)
    found = generate(spec_strategy=config, assistant=learned("unigram"), **BOTH)
    assert torch.equal(found.sequences, generate().sequences)
    assert found.spec_stats.tau > 0.2


class TestNamedAssistants:
    """Assistants named by a folder, which also contains the tokenizer."""

    @pytest.fixture
    def folders(self, tmp_path: Path) -> tuple[Path, Path]:
        for name, kind, tokenizer in (("t", "bpe", bpe()), ("d", "unigram", unigram())):
            learned(kind).save_pretrained(tmp_path / name)
            tokenizer.save_pretrained(tmp_path / name)
        return tmp_path / "t", tmp_path / "d"

    def test_both_are_loaded(self, folders: tuple[Path, Path]) -> None:
        model = type(learned("bpe")).from_pretrained(folders[0]).eval()
        options = {**batch(), "max_new_tokens": 20}
        found = model.generate(
            **options,
            spec_strategy=hf_spec.TreeConfig(max_draft_tokens=4, max_nodes=9),
            assistant=folders[1],
            return_dict_in_generate=True,
        )
        assert torch.equal(found.sequences, model.generate(**options))
        assert found.spec_stats.tau > 0.2
        draft = find_draft("draft", str(folders[1]), model)
        assert draft.pair is not None
        assert find_draft("tree", str(folders[1]), model).pair is draft.pair

    def test_a_folder_without_one(self, folders: tuple[Path, Path]) -> None:
        model = type(learned("bpe")).from_pretrained(folders[0]).eval()
        for path in folders[1].glob("token*"):
            path.unlink()
        with pytest.raises(AssistantError, match="pass both to generate"):
            find_draft("draft", folders[1], model)


def test_a_model_of_the_targets_own_vocabulary_needs_none() -> None:
    found = find_draft("draft", learned("bpe"), learned("bpe"))
    assert found == LoadedDraft(learned("bpe"))
    with pytest.raises(AssistantError, match="vocabulary has"):
        find_draft("draft", random_model(wordpiece()), learned("bpe"))


PROMPT = repetitive_prompt()


class TestOptions:
    @pytest.mark.parametrize("strategy", ["draft", "tree"])
    def test_no_assistant(self, strategy: str) -> None:
        with pytest.raises(AssistantError, match="truncated_draft"):
            build("llama").generate(PROMPT, max_new_tokens=4, spec_strategy=strategy)

    @pytest.mark.parametrize(
        "options",
        [
            {"max_draft_tokens": 0},
            {"length_policy": "often"},
            {"confidence_threshold": 2},
            {"sample_drafts": 1},
            {"children": 0},
            {"expanded_per_level": 1.5},
            {"max_nodes": 0},
            {"min_probability": -0.1},
            {"min_sibling_ratio": 1.1},
        ],
    )
    def test_options(self, options: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match=next(iter(options))):
            TreeConfig(**options)
