"""Resolving a call: strategy, settings, drafter, stop strings."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, GenerationMixin, WatermarkingConfig
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec import AssistantError, LookupConfig, OptionError, UnsupportedError
from hf_spec.common.logging import log_once
from hf_spec.generation import call_setup
from hf_spec.generation.call_checks import OTHER_METHODS, SUPPORTED_VALUES
from hf_spec.generation.call_setup import (
    REPLACED_BY,
    UNSUPPORTED_ARGUMENTS,
    build_drafter,
    resolve_call,
    stop_strings_to_criteria,
    without_static_cache,
)
from hf_spec.generation.hook import STORED, original_generate
from hf_spec.methods.lookup.drafter import LookupDrafter
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.refusals import refuse
from tests.tiny_models import build, ragged_batch


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


# Settings that strategies support, each with a value that is not the default. `generate()` turns
# them into inputs, processors and stopping criteria, or they change the output format.
SUPPORTED: dict[str, Any] = {
    "max_length": 30,
    "max_new_tokens": 9,
    "min_length": 28,
    "min_new_tokens": 5,
    "max_time": 60.0,
    "stop_strings": ["ba"],
    "do_sample": False,
    "temperature": 0.5,
    "top_k": 1,
    "top_p": 0.1,
    "min_p": 0.5,
    "top_h": 0.5,
    "typical_p": 0.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
    "repetition_penalty": 1.5,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 2,
    "encoder_no_repeat_ngram_size": 2,
    "bad_words_ids": [[25], [7, 9]],
    "renormalize_logits": True,
    "forced_bos_token_id": 9,
    "forced_eos_token_id": 9,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": (2, 1.5),
    "suppress_tokens": [25],
    "begin_suppress_tokens": [76],
    "sequence_bias": [[[25], -9.0]],
    "watermarking_config": WatermarkingConfig(bias=9.0),
    "num_return_sequences": 1,
    "output_scores": True,
    "output_logits": True,
    "return_dict_in_generate": True,
    "pad_token_id": 3,
    "bos_token_id": 9,
    "eos_token_id": [25, 76],
    "decoder_start_token_id": 9,
}
# Settings that do not affect a call with a strategy, with the reason.
IRRELEVANT = {
    **dict.fromkeys(
        (
            "early_stopping",
            "length_penalty",
            "low_memory",
            "diversity_penalty",
            "num_beam_groups",
        ),
        "beam search alone reads it, and num_beams above 1 raises",
    ),
    **dict.fromkeys(
        ("cache_config", "max_cache_len"),
        "it belongs to caches that generate() makes; the engine has storage of its own",
    ),
    **dict.fromkeys(
        ("compile_config", "disable_compile"),
        "torch.compile of a static cache's step, which the engine does not run",
    ),
    "continuous_batching_config": "an argument of generate_batch(), which raises for it",
    "transformers_version": "the version that wrote the file",
    "_from_model_config": "whether the config was derived from the model's",
    "_commit_hash": "the revision that the file was loaded from",
}


def test_every_field_of_a_generation_config_is_known() -> None:
    """Fields added by new versions of transformers must be supported, rejected or explained."""
    fields = set(vars(GenerationConfig())) - set(STORED)
    kinds = [
        set(SUPPORTED),
        set(SUPPORTED_VALUES),
        set(OTHER_METHODS),
        set(REPLACED_BY),
        set(IRRELEVANT),
    ]
    assert fields - set().union(*kinds) == set()
    assert sum(map(len, kinds)) == len(set().union(*kinds)), "one place for each"


def test_every_argument_of_generate_is_known() -> None:
    """Arguments of `generate()` that are not settings are supported or rejected."""
    parameters = inspect.signature(original_generate()).parameters
    understood = {
        "self",
        "inputs",
        "generation_config",
        "logits_processor",
        "stopping_criteria",
        "prefix_allowed_tokens_fn",
        "streamer",
        "kwargs",
    }
    # Not every version of transformers has these as named parameters.
    assert set(parameters) - understood <= {*UNSUPPORTED_ARGUMENTS, "use_model_defaults"}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_settings_have_their_effect(name: str) -> None:
    call: dict[str, Any] = {**ragged_batch(), "max_new_tokens": 8, name: SUPPORTED[name]}
    if name == "max_length":
        del call["max_new_tokens"]
    if name == "stop_strings":
        call["tokenizer"] = tiny_models.tokenizer()
    # With top_k=1 sampling is deterministic.
    if name in {"temperature", "top_k", "top_p", "min_p", "top_h", "typical_p"} or "cutoff" in name:
        call.update({"do_sample": True, "top_k": 1})
    if name == "exponential_decay_length_penalty":
        call["eos_token_id"] = 25
    call.setdefault("pad_token_id", 0)
    model = build("llama")
    plain, ours = model.generate(**call), model.generate(**call, spec_strategy="lookup")
    if name == "return_dict_in_generate":
        plain, ours = plain.sequences, ours.sequences
    assert torch.equal(ours, plain)


CASES = [
    ("draft", "num_assistant_tokens", 5, r"DraftConfig\(max_draft_tokens=5\)"),
    ("lookup", "num_assistant_tokens", 5, r"LookupConfig\(max_draft_tokens=5\)"),
    ("sdsat", "num_assistant_tokens", 5, r"SdsatConfig\(num_adaptive=5\)"),
    ("none", "num_assistant_tokens", 5, "leave it out"),
    # The default value, passed explicitly.
    ("draft", "num_assistant_tokens", 20, r"DraftConfig\(max_draft_tokens=20\)"),
    ("tree", "num_assistant_tokens_schedule", "constant", r"\(length_policy='static'\)"),
    ("draft", "num_assistant_tokens_schedule", "heuristic", r"\(length_policy='heuristic'\)"),
    (
        "draft",
        "assistant_confidence_threshold",
        0.3,
        r"DraftConfig\(length_policy='confidence', confidence_threshold=0.3\)",
    ),
    ("lookup", "assistant_confidence_threshold", 0.3, "leave it out"),
    ("lookup", "max_matching_ngram_size", 3, r"LookupConfig\(match_length=3\)"),
    ("draft", "assistant_lookbehind", 5, "leave it out"),
    ("draft", "target_lookbehind", 5, "leave it out"),
]


class TestReplaced:
    @pytest.mark.parametrize(("strategy", "name", "value", "way_out"), CASES)
    def test_an_argument_names_the_option(
        self, strategy: str, name: str, value: Any, way_out: str
    ) -> None:
        match = f"{name}={value!r} is a setting of .* assisted generation, .*{way_out}"
        draft = build("llama", seed=1)
        assistant = draft if strategy in {"draft", "tree"} else None
        given = {"spec_strategy": strategy, "assistant": assistant, name: value}
        refuse(match, error=OptionError, **given)

    def test_every_one_is_tested(self) -> None:
        assert {name for _, name, *_ in CASES} == set(REPLACED_BY)

    def test_the_named_options_exist(self) -> None:
        """The options named in the messages work."""
        model, draft = build("llama"), build("llama", seed=1)
        prompt = ragged_batch()
        plain = model.generate(**prompt, max_new_tokens=4, pad_token_id=0)
        options: tuple[dict[str, Any], ...] = (
            {"max_draft_tokens": 5},
            {"length_policy": "static"},
            {"length_policy": "heuristic"},
            {"length_policy": "confidence", "confidence_threshold": 0.3},
        )
        for option in options:
            call = {"spec_strategy": {"strategy": "draft", **option}, "assistant": draft}
            found = model.generate(**prompt, max_new_tokens=4, pad_token_id=0, **call)
            assert torch.equal(found, plain)

    def test_a_config_of_the_call(self) -> None:
        config = GenerationConfig(num_assistant_tokens=5, max_new_tokens=4)
        refuse("num_assistant_tokens=5", error=OptionError, generation_config=config)

    @pytest.mark.parametrize("method", ["generate_batch", "generate_batch_iter"])
    def test_batches(self, method: str) -> None:
        with pytest.raises(OptionError, match="num_assistant_tokens=5"):
            getattr(build("llama"), method)(
                [[5, 6]], max_new_tokens=4, spec_strategy="lookup", num_assistant_tokens=5
            )


class TestStored:
    """Values stored in generation configs, which the user did not set."""

    @pytest.fixture(autouse=True)
    def forget(self) -> None:
        log_once.cache_clear()

    def generate(self, model: GenerationMixin, **call: Any) -> None:
        given = {"max_new_tokens": 4, "pad_token_id": 0, "spec_strategy": "lookup", **call}
        model.generate(**ragged_batch(), **given)

    def said(self, caplog: pytest.LogCaptureFixture) -> list[str]:
        ours = call_setup.__name__
        return [record.getMessage() for record in caplog.records if record.name == ours]

    def test_defaults_are_silent(self, caplog: pytest.LogCaptureFixture) -> None:
        """Files written by older versions contain these defaults."""
        model = copy.deepcopy(build("llama"))
        defaults = GenerationConfig._get_default_generation_params()
        for name in REPLACED_BY:
            setattr(model.generation_config, name, defaults.get(name))
        assert model.generation_config.num_assistant_tokens == 20
        self.generate(model)
        self.generate(model, generation_config=copy.deepcopy(model.generation_config))
        self.generate(model, spec_strategy="draft", assistant=copy.deepcopy(model))
        assert self.said(caplog) == []

    def test_what_a_checkpoint_chose_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        model = copy.deepcopy(build("llama"))
        model.generation_config.num_assistant_tokens = 5
        for _ in range(2):
            self.generate(model)
            # The model's own config with another setting changed.
            config = copy.deepcopy(model.generation_config)
            config.repetition_penalty = 1.1
            self.generate(model, generation_config=config)
        [message] = self.said(caplog)
        assert message.startswith("model.generation_config: num_assistant_tokens=5 is a setting of")

    def test_an_assistant_whose_config_chose(self, caplog: pytest.LogCaptureFixture) -> None:
        """A length for transformers' assisted generation, stored on an assistant, warns."""
        model, draft = build("llama"), copy.deepcopy(build("llama", seed=1))
        draft.generation_config.num_assistant_tokens = 5
        for assistant in (draft, [draft]):
            strategy = "auto" if isinstance(assistant, list) else "draft"
            self.generate(model, spec_strategy=strategy, assistant=assistant)
        said = (
            "assistant.generation_config: num_assistant_tokens=5 .*={}Config\\(max_draft_tokens=5"
        )
        for message, name in zip(self.said(caplog), ("Draft", "Auto"), strict=True):
            assert re.match(said.format(name), message)
