"""What a call with a strategy settles before anything runs: model, settings and drafter."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedModel
from transformers.generation import StoppingCriteriaList, StopStringCriteria

from hf_spec.common.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.models.support_checks import check_model
from hf_spec.generation.assisted_settings import (
    check_assisted,
    generation_configs,
    warn_of_stored,
)
from hf_spec.generation.call_checks import Settings, check_called, check_settings
from hf_spec.generation.compiling import warm_up
from hf_spec.generation.target_checks import check_cache_length, check_evaluation, check_rows_apart
from hf_spec.methods.auto.known_drafters import known_drafters
from hf_spec.methods.draft_model.other_tokenizer.assistant import with_tokenizers
from hf_spec.methods.draft_model.trained import METHOD as DRAFT
from hf_spec.methods.loading import find_assistant
from hf_spec.methods.registry import make_drafter, parse_strategy

# Arguments of generate() that choose or feed another decoding method.
REFUSED_ARGUMENTS = {
    "assistant_model": "pass the draft model as assistant=; for transformers' own assisted "
    "decoding set model.generation_config.spec_strategy = None",
    "custom_generate": "it replaces the decoding loop, and so does spec_strategy; leave one out",
    "negative_prompt_ids": "classifier-free guidance is not available with it; leave it out",
    "negative_prompt_attention_mask": "classifier-free guidance is not available with it; leave it "
    "out",
    "synced_gpus": "FSDP and ZeRO-3 are not served; generate without spec_strategy",
    "inputs_embeds": "give the prompt as input_ids",
}


def settle(
    model: PreTrainedModel, strategy: Any, given: dict[str, Any]
) -> tuple[StrategyConfig, Settings]:
    """Return the strategy and the settings of a call, once all of them are supported."""
    config = parse_strategy(strategy)
    for name, reason in REFUSED_ARGUMENTS.items():
        if given.get(name) is not None and given[name] is not False:
            raise UnsupportedError(f"{name}= cannot be combined with spec_strategy: {reason}")
    _check_misplaced(config, given)
    check_called(given)
    check_assisted(config, model, given)
    check_model(model)
    check_cache_length(model, given)
    check_rows_apart(model)
    check_evaluation(model)
    settings = Settings(model, given)
    check_settings(settings)
    return config, settings


def _check_misplaced(config: StrategyConfig, given: dict[str, Any]) -> None:
    """Refuse options of the strategy among the arguments of `generate()`."""
    options = {option.name for option in dataclasses.fields(config)}
    if misplaced := sorted(options & given.keys()):
        name = misplaced[0]
        raise OptionError(
            f"{name}= is an option of the strategy, not of generate(): "
            f"spec_strategy={type(config).__name__}({name}={given[name]!r})"
        )


def with_own_storage(settings: Settings, given: dict[str, Any]) -> dict[str, Any]:
    """Keep `generate()` from reserving a static cache: the engine's storage is one."""
    static = settings["cache_implementation"] == "static"
    return {**given, "cache_implementation": None} if static else given


def build_drafter(
    config: StrategyConfig, model: PreTrainedModel, assistant: Any, given: dict[str, Any]
) -> Drafter:
    """Build the drafter of a call from its assistant and tokenizers, and prepare the target."""
    assistant = find_assistant(assistant, model, config.adapter_methods)
    for stored in generation_configs(assistant):
        warn_of_stored(config, "assistant.generation_config", stored)
    if config.needs_assistant and assistant is None:
        raise AssistantError(
            f"spec_strategy={config.strategy!r} needs assistant={_what_drafts(config)}"
        )
    tokenizers = (given.get(name) for name in ("tokenizer", "assistant_tokenizer"))
    drafter = make_drafter(config, model, with_tokenizers(config, assistant, *tokenizers))
    drafter.compile = config.compile
    if config.compile:
        warm_up(model)
    return drafter


def _what_drafts(config: StrategyConfig) -> str:
    """What the assistant of a strategy is, and how to come by one."""
    methods = config.adapter_methods or ()
    if DRAFT in methods:
        return "<model, folder or Hub id>, for instance hf_spec.truncated_draft(model, num_layers)"
    if methods:
        return f"<folder or Hub id of an adapter>; `hf-spec train {methods[0]}` makes one"
    if any(drafter.strategy == config.strategy for drafter in known_drafters()):
        return "<folder or Hub id>; hf_spec.heads_for(model) names published ones"
    return ""


def stop_strings_to_criteria(strings: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Turn stop strings into a criterion here, because tokenizers do not get through."""
    given = dict(given)
    given.pop("assistant_tokenizer", None)
    tokenizer = given.pop("tokenizer", None)
    if strings is None:
        return given
    if tokenizer is None:
        raise OptionError(
            f"stop_strings={strings!r} need the model's tokenizer: generate(..., "
            "tokenizer=tokenizer)"
        )
    criteria = StoppingCriteriaList(given.get("stopping_criteria") or [])
    # As in plain generate(), a criterion that the caller made goes before the setting.
    if not any(type(criterion) is StopStringCriteria for criterion in criteria):
        criteria.append(StopStringCriteria(stop_strings=strings, tokenizer=tokenizer))
    return {**given, "stopping_criteria": criteria, "stop_strings": None}
