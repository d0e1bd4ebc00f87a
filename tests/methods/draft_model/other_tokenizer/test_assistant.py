"""The tokenizers of a call: when they are needed, how they are loaded, and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import AssistantError, DiscoConfig, DraftConfig, OptionError, UnsupportedError
from hf_spec.methods.draft_model.other_tokenizer.assistant import LoadedDraft, find_draft
from tests.other_tokenizers import batch, bpe, learned, random_model, unigram, wordpiece
from tests.tiny_models import disco_adapter

BOTH = {"tokenizer": bpe(), "assistant_tokenizer": unigram()}


def generate(**options: Any) -> Any:
    return learned("bpe").generate(
        **batch(), max_new_tokens=6, return_dict_in_generate=True, **options
    )


def refused(error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        generate(**{"spec_strategy": "draft", "assistant": learned("unigram"), **options})


class TestRefusals:
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
    """Folders have tokenizers; commands name nothing else."""

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
