"""Resolve a call before anything runs: strategy, settings, drafter and stop strings.

Settings of transformers' assisted generation are replaced by options of a strategy. A call that
sets one raises an error. A value that a checkpoint's generation config stores was not necessarily
chosen for this call, so it is logged as a warning if it differs from the default.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec.common.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.common.logging import log_once
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.models.support_checks import check_model, check_weights
from hf_spec.generation.call_checks import Settings, check_callables, check_settings
from hf_spec.generation.compiling import warm_up
from hf_spec.generation.target_checks import (
    check_cache_length,
    check_evaluation,
    check_input_scales,
)
from hf_spec.methods.auto.known_drafters import known_drafters
from hf_spec.methods.draft_model.loading import with_tokenizers
from hf_spec.methods.draft_model.trained import METHOD as DRAFT
from hf_spec.methods.loading import find_assistant
from hf_spec.methods.registry import make_drafter, parse_strategy

logger = logging.getLogger(__name__)

# Arguments of generate() for other decoding methods, and what to do instead.
UNSUPPORTED_ARGUMENTS = {
    "assistant_model": "pass the draft model as assistant=; for transformers' own assisted "
    "decoding set model.generation_config.spec_strategy = None",
    "custom_generate": "it replaces the decoding loop, and so does spec_strategy; leave one out",
    "negative_prompt_ids": "classifier-free guidance is not supported; leave it out",
    "negative_prompt_attention_mask": "classifier-free guidance is not supported; leave it out",
    "synced_gpus": "FSDP and ZeRO-3 are not supported; generate without spec_strategy",
    "inputs_embeds": "pass the prompt as input_ids",
}
# Setting -> options that replace it, in order of preference; empty if there is none.
REPLACED_BY: dict[str, tuple[str, ...]] = {
    "num_assistant_tokens": ("max_draft_tokens", "num_adaptive"),
    "num_assistant_tokens_schedule": ("length_policy",),
    "assistant_confidence_threshold": ("confidence_threshold",),
    "max_matching_ngram_size": ("match_length",),
    "assistant_lookbehind": (),
    "target_lookbehind": (),
}
# Schedule of transformers -> equivalent length policy.
POLICIES = {"constant": "static", "heuristic": "heuristic", "heuristic_transient": "heuristic"}


def resolve_call(
    model: PreTrainedModel, strategy: Any, arguments: dict[str, Any]
) -> tuple[StrategyConfig, Settings]:
    """Return the strategy and the settings of a call, after checking both and the target."""
    config = parse_strategy(strategy)
    for name, remedy in UNSUPPORTED_ARGUMENTS.items():
        if arguments.get(name) is not None and arguments[name] is not False:
            raise UnsupportedError(f"{name}= cannot be combined with spec_strategy: {remedy}")
    _check_misplaced(config, arguments)
    check_callables(arguments)
    check_assisted(config, model, arguments)
    check_model(model)
    check_weights(model)
    check_cache_length(model, arguments)
    check_input_scales(model)
    check_evaluation(model)
    settings = Settings(model, arguments)
    check_settings(settings)
    return config, settings


def _check_misplaced(config: StrategyConfig, arguments: dict[str, Any]) -> None:
    options = {option.name for option in dataclasses.fields(config)}
    if misplaced := sorted(options & arguments.keys()):
        name = misplaced[0]
        raise OptionError(
            f"{name}= is an option of the strategy, not of generate(): "
            f"spec_strategy={type(config).__name__}({name}={arguments[name]!r})"
        )


def without_static_cache(settings: Settings, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments with which `generate()` allocates no static cache next to the pool."""
    static = settings["cache_implementation"] == "static"
    return {**arguments, "cache_implementation": None} if static else arguments


def build_drafter(
    config: StrategyConfig, model: PreTrainedModel, assistant: Any, arguments: dict[str, Any]
) -> Drafter:
    """Return the drafter of a call, compiling the target if asked."""
    assistant = find_assistant(assistant, model, config.adapter_methods)
    for stored in generation_configs(assistant):
        warn_of_stored(config, "assistant.generation_config", stored)
    if config.needs_assistant and assistant is None:
        raise AssistantError(
            f"spec_strategy={config.strategy!r} needs assistant={_assistant_hint(config)}"
        )
    check_weights(assistant)
    tokenizers = (arguments.get(name) for name in ("tokenizer", "assistant_tokenizer"))
    drafter = make_drafter(config, model, with_tokenizers(config, assistant, *tokenizers))
    if drafter.hidden_layers and model.config.is_encoder_decoder:
        raise UnsupportedError(
            f"spec_strategy={config.strategy!r} drafts from hidden states, which encoder-decoders "
            f"such as {type(model).__name__} do not provide; use 'lookup', 'draft', or 'tree'"
        )
    drafter.compile = config.compile
    if config.compile:
        warm_up(model)
    return drafter


def _assistant_hint(config: StrategyConfig) -> str:
    methods = config.adapter_methods or ()
    if DRAFT in methods:
        return "<model, folder or Hub id>, for instance hf_spec.truncated_draft(model, num_layers)"
    if methods:
        return f"<folder or Hub id of an adapter>; train one with `hf-spec train {methods[0]}`"
    if any(drafter.strategy == config.strategy for drafter in known_drafters()):
        return "<folder or Hub id>; hf_spec.heads_for(model) names published ones"
    return ""


def stop_strings_to_criteria(strings: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return arguments without tokenizers, with a stopping criterion for the stop strings."""
    arguments = dict(arguments)
    # `generate()` does not pass the tokenizers on to `custom_generate`.
    arguments.pop("assistant_tokenizer", None)
    tokenizer = arguments.pop("tokenizer", None)
    if strings is None:
        return arguments
    if tokenizer is None:
        raise OptionError(
            f"stop_strings={strings!r} need the model's tokenizer: generate(..., "
            "tokenizer=tokenizer)"
        )
    criteria = StoppingCriteriaList(arguments.get("stopping_criteria") or [])
    # As in plain generate(), the caller's criterion takes precedence over the setting.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**arguments, "stopping_criteria": criteria, "stop_strings": None}


def check_assisted(
    config: StrategyConfig, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> None:
    """Raise `OptionError` for a setting of assisted generation in a call; log the model's."""
    stored = getattr(model, "generation_config", None)
    call_config = arguments.get("generation_config")
    for name in REPLACED_BY:
        value = arguments.get(name)
        if value is None and getattr(call_config, name, None) != getattr(stored, name, None):
            # Equal values come from a copy of the model's config.
            value = _unusual(call_config, name)
        if value is not None:
            raise OptionError(_explain(config, name, value))
    warn_of_stored(config, "model.generation_config", stored)


def warn_of_stored(config: StrategyConfig, where: str, stored: Any) -> None:
    """Log once each setting of assisted generation that a model's generation config stores."""
    for name in REPLACED_BY:
        if (value := _unusual(stored, name)) is not None:
            log_once(logger, logging.WARNING, f"{where}: {_explain(config, name, value)}")


def generation_configs(assistant: Any) -> Iterator[Any]:
    """Yield the generation configs of an assistant, or of each assistant in a list."""
    for model in assistant if isinstance(assistant, (list, tuple)) else [assistant]:
        if (stored := getattr(model, "generation_config", None)) is not None:
            yield stored


def _unusual(config: Any, name: str) -> Any:
    """Return a setting unless it is unset or has its default value, which many files store."""
    value = getattr(config, name, None)
    return None if value == _defaults().get(name) else value


@cache
def _defaults() -> dict[str, Any]:
    read = getattr(GenerationConfig, "_get_default_generation_params", dict)
    return dict(read())


def _explain(config: StrategyConfig, name: str, value: Any) -> str:
    options = {option.name for option in dataclasses.fields(config)}
    option = next((option for option in REPLACED_BY[name] if option in options), None)
    remedy = "leave it out"
    if option is not None:
        values = {option: POLICIES.get(value, value) if option == "length_policy" else value}
        if option == "confidence_threshold":
            values = {"length_policy": "confidence", **values}
        text = ", ".join(f"{key}={setting!r}" for key, setting in values.items())
        remedy = f"use spec_strategy={type(config).__name__}({text})"
    return (
        f"{name}={value!r} is a setting of transformers' assisted generation, which "
        f"spec_strategy={config.strategy!r} does not read: {remedy}"
    )
