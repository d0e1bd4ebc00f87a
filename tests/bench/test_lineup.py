"""Who takes part, and what is refused before anything runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hf_spec import AssistantError, LookupConfig, OptionError, TreeConfig
from hf_spec.bench.contenders import GREEDY
from hf_spec.bench.entries import Entry, parse_entry
from hf_spec.bench.lineup import make_contenders
from hf_spec.bench.settings import Suite
from tests.model_watch import count_forwards
from tests.tiny_models import VOCAB, build, draft_model, padded, save_disco_adapter

LOOKUP, TREE, DRAFT = (
    parse_entry(text) for text in ("lookup", "tree@truncated:2", "draft@truncated:2")
)


def names(model: Any, entries: Any, suite: Suite) -> list[str]:
    return [contender.name for contender in make_contenders(model, entries, suite, GREEDY)]


class TestContenders:
    def test_others_take_part(self, model: Any) -> None:
        economize = ["economize lookup"] if importlib.util.find_spec("economize") else []
        ours = ["lookup", "tree@truncated:2", "draft@truncated:2"]
        # Both of our strategies have the same draft model, so it is measured once.
        others = ["transformers lookup", "transformers assistant", *economize]
        assert names(model, [LOOKUP, TREE, DRAFT], Suite()) == ["plain", *others, *ours]

    def test_two_draft_models_are_two_baselines(self, model: Any) -> None:
        entries = [TREE, parse_entry("gsd@truncated:1")]
        found = names(model, entries, Suite())
        assert [n for n in found if n.startswith("transformers assistant")] == [
            "transformers assistant",
            "transformers assistant 2",
        ]

    def test_transformers_takes_drafts_of_its_own_width_alone(self, model: Any) -> None:
        entries = [Entry("padded", TreeConfig(), padded(draft_model("llama"), VOCAB + 3))]
        assert names(model, entries, Suite())[-1] == "padded"
        assert "transformers assistant" not in names(model, entries, Suite())

    def test_economize_cannot_sample(self, model: Any) -> None:
        assert names(model, [], Suite(sample=True)) == ["plain", "transformers lookup"]


class TestRefusals:
    @pytest.mark.parametrize("knowing", [{"synthetic_acceptance": 0.5}, {"oracle": "x"}])
    def test_sampling_with_known_answers(self, knowing: dict[str, Any]) -> None:
        with pytest.raises(OptionError, match="choose greedy"):
            Suite(sample=True, **knowing)

    def test_the_same_entry_twice(self, model: Any) -> None:
        with pytest.raises(OptionError, match="--strategy a is given 2 times"):
            names(model, [Entry("a", LookupConfig())] * 2, Suite())

    def test_an_adapter_of_another_model(self, tmp_path: Path, model: Any) -> None:
        save_disco_adapter(tmp_path, build("gpt2"))
        entries = [parse_entry(f"disco@{tmp_path}")]
        with count_forwards(model) as calls, pytest.raises(AssistantError):
            names(model, entries, Suite())
        assert not calls
