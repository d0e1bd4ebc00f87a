"""Resolving a call: strategy, settings, drafter, stop strings."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec import AssistantError, LookupConfig, OptionError, UnsupportedError
from hf_spec.generation.call_setup import (
    UNSUPPORTED_ARGUMENTS,
    build_drafter,
    resolve_call,
    stop_strings_to_criteria,
    without_static_cache,
)
from hf_spec.methods.lookup.drafter import LookupDrafter
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.refusals import refuse


def test_strategy_and_settings_come_back() -> None:
    config, settings = resolve_call(tiny_models.build("llama"), "lookup", {"max_new_tokens": 3})
    assert config == LookupConfig()
    assert settings["max_new_tokens"] == 3


@pytest.mark.parametrize("name", UNSUPPORTED_ARGUMENTS)
def test_arguments_of_other_methods_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        resolve_call(tiny_models.build("llama"), "lookup", {name: object()})


def test_a_static_cache_is_not_reserved() -> None:
    model = tiny_models.build("llama")
    given: dict[str, Any] = {"cache_implementation": "static"}
    _, settings = resolve_call(model, "lookup", given)
    assert without_static_cache(settings, given) == {"cache_implementation": None}
    _, settings = resolve_call(model, "lookup", {})
    assert without_static_cache(settings, {}) == {}


def test_drafters_and_what_they_lack() -> None:
    model = tiny_models.build("llama")
    assert isinstance(
        build_drafter(LookupConfig(max_draft_tokens=5), model, None, {}), LookupDrafter
    )
    with pytest.raises(AssistantError, match="needs assistant"):
        build_drafter(parse_strategy("draft"), model, None, {})


@pytest.mark.parametrize(
    ("strategy", "way_out"),
    [
        ("tree", "truncated_draft"),
        ("falcon", "hf-spec train falcon"),
        ("disco", "hf-spec train disco"),
        ("eagle", "heads_for"),
        ("block", "heads_for"),
        ("heads", "heads_for"),
        ("pard", "heads_for"),
        ("gemma_assistant", "heads_for"),
    ],
)
def test_who_lacks_an_assistant_hears_where_to_get_one(strategy: str, way_out: str) -> None:
    with pytest.raises(AssistantError, match=f"'{strategy}' needs assistant=.*{way_out}"):
        build_drafter(parse_strategy(strategy), tiny_models.build("llama"), None, {})


@pytest.mark.parametrize("strategy", ["draft", "falcon", "eagle", "auto"])
@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_no_folder(strategy: str, name: str) -> None:
    with pytest.raises(AssistantError, match=f"assistant='{name}' is an empty name"):
        build_drafter(parse_strategy(strategy), tiny_models.build("llama"), name, {})


def test_options_of_the_strategy_are_not_for_generate() -> None:
    with pytest.raises(OptionError, match=r"spec_strategy=LookupConfig\(copy_length=3\)"):
        resolve_call(tiny_models.build("llama"), "lookup", {"copy_length": 3})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits_processor": 5}, "logits_processor of type int: pass a list of them"),
        ({"stopping_criteria": len}, "stopping_criteria of type .*: pass a list of them"),
        ({"stopping_criteria": [5]}, "stopping_criteria contains 5, which cannot be called"),
        ({"prefix_allowed_tokens_fn": 5}, "prefix_allowed_tokens_fn=5 cannot be called"),
    ],
)
def test_what_cannot_be_called_is_said_before_the_first_forward(
    given: dict[str, Any], message: str
) -> None:
    refuse(message, error=OptionError, **given)


def test_stop_strings_become_a_criterion() -> None:
    tokenizer = tiny_models.tokenizer()
    found = stop_strings_to_criteria(["ba"], {"tokenizer": tokenizer, "max_new_tokens": 3})
    assert set(found) == {"stopping_criteria", "stop_strings", "max_new_tokens"}
    assert found["stop_strings"] is None
    assert [type(one) for one in found["stopping_criteria"]] == [StopStringCriteria]
    own = StoppingCriteriaList(found["stopping_criteria"])
    again = stop_strings_to_criteria(["be"], {"tokenizer": tokenizer, "stopping_criteria": own})
    assert list(again["stopping_criteria"]) == list(own)
    assert stop_strings_to_criteria(None, {"assistant_tokenizer": tokenizer}) == {}
    with pytest.raises(OptionError, match="tokenizer"):
        stop_strings_to_criteria(["ba"], {})
