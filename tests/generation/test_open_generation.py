"""Requests for an open batch: checks on arrival, and settings of each request."""

from __future__ import annotations

import warnings

import pytest
from transformers import GenerationConfig

from hf_spec import AssistantError, LookupConfig, OptionError, UnsupportedError
from hf_spec.generation.open_generation import OpenGeneration
from tests import tiny_models
from tests.open_requests import PROMPTS, generation, greedy


def test_an_assistant_that_is_missing_is_missed_at_once() -> None:
    with pytest.raises(AssistantError, match="needs assistant"):
        OpenGeneration(tiny_models.build("llama"), "draft", None, None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"prompt_lookup_num_tokens": 3}, "prompt_lookup_num_tokens"),
        ({"new_tokens": 0}, "max_new_tokens"),
        ({"stop_strings": ["a"]}, "tokenizer"),
    ],
)
def test_what_cannot_be_served_is_refused_when_it_comes(
    settings: dict[str, object], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        generation().prepare("name", PROMPTS[0], greedy(**settings))  # type: ignore[arg-type]


def test_a_prompt_of_no_tokens_or_of_others_is_refused() -> None:
    for prompt in ([], [tiny_models.VOCAB]):
        with pytest.raises(UnsupportedError, match="prompt 0 has"):
            generation().prepare("name", prompt, greedy())


def test_all_requests_have_one_strategy() -> None:
    own = generation()
    same = greedy()
    same.spec_strategy = own.config  # type: ignore[attr-defined]
    own.prepare("name", PROMPTS[0], same)
    other = greedy()
    other.spec_strategy = LookupConfig(match_length=5)  # type: ignore[attr-defined]
    with pytest.raises(OptionError, match="so the strategy, which is"):
        own.prepare("name", PROMPTS[0], other)


def test_nothing_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ready = generation().prepare("name", PROMPTS[0], GenerationConfig(max_new_tokens=4))
    assert caplog.text == ""
    assert (ready.request.request_id, ready.request.prompt) == ("name", PROMPTS[0])
