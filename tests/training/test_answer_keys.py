"""A stored answer belongs to one model, one set of settings and one prompt."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import OptionError
from hf_spec.training.answer_keys import answer_keys, check_answered, model_facts, weights_digest
from tests.tiny_models import build, repetitive_prompt


class TestWeights:
    def test_any_weight_counts(self) -> None:
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        assert weights_digest(copy.deepcopy(model)) == before
        for parameter in model.parameters():
            with torch.no_grad():
                flat = parameter.view(-1)
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(9.0))
            assert weights_digest(model) != before
            with torch.no_grad():
                flat[-1] = torch.nextafter(flat[-1], torch.tensor(-9.0))
        assert weights_digest(model) == before

    def test_chunks_that_change_places(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("hf_spec.training.answer_keys.CHUNK", 8)
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        rows = model.get_input_embeddings().weight.data
        rows[[2, 3]] = rows[[3, 2]]
        assert weights_digest(model) != before

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_dtypes(self, dtype: torch.dtype) -> None:
        model = copy.deepcopy(build("llama")).to(dtype)
        facts = model_facts(model)
        assert facts["dtype"] == str(dtype).removeprefix("torch.")
        assert facts["weights"] != weights_digest(build("llama"))

    def test_generation_does_not_change_it(self) -> None:
        """Not even where weights are packed and layers compiled for it."""
        model = copy.deepcopy(build("llama"))
        before = weights_digest(model)
        model.generate(repetitive_prompt(), max_new_tokens=8, spec_strategy="lookup")
        assert weights_digest(model) == before


def test_a_folder_is_known_by_its_whole_path(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    model.save_pretrained(folder)
    loaded = type(model).from_pretrained(folder)
    assert model_facts(loaded)["model"] == str(folder)
    monkeypatch.chdir(tmp_path)
    assert model_facts(type(model).from_pretrained("model")) == model_facts(loaded)


FACTS = {"model": "a", "seed": 1}
PROMPTS = [[1, 2], [3], [1, 2]]


class TestKeys:
    def test_every_row_has_its_own(self) -> None:
        keys = answer_keys(FACTS, PROMPTS)
        assert len(set(keys)) == 3
        assert answer_keys(dict(reversed(FACTS.items())), PROMPTS) == keys

    def test_they_follow_the_content(self) -> None:
        keys = answer_keys(FACTS, PROMPTS)
        assert answer_keys(FACTS, [[9], [3], [1, 2], [1, 2]])[1:] == [
            keys[1],
            keys[0],
            keys[2],
        ]

    @pytest.mark.parametrize("facts", [{"model": "b", "seed": 1}, {"model": "a", "seed": 2}])
    def test_another_run_has_others(self, facts: dict[str, object]) -> None:
        assert not {*answer_keys(facts, PROMPTS)} & {*answer_keys(FACTS, PROMPTS)}

    def test_answers_to_other_prompts_are_refused(self) -> None:
        check_answered(Path("f"), ["a"], ["a", "b"])
        with pytest.raises(OptionError, match="f holds answers to 1 prompts that are not among"):
            check_answered(Path("f"), ["a", None], ["a", "b"])
