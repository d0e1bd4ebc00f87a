"""Settings of transformers' assisted generation, which options of a strategy replace.

A call that sets one raises an error. A value that a checkpoint's generation config stores was not
necessarily chosen for this call, so it is logged as a warning if it differs from the default.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from hf_spec.common.errors import OptionError
from hf_spec.drafting.config import StrategyConfig

logger = logging.getLogger(__name__)

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


def check_assisted(
    config: StrategyConfig, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> None:
    """Raise `OptionError` for a setting of assisted generation among the `arguments` of a call.

    The message names the option that replaces it. Settings that the model stores are only logged.
    """
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
            _warn(f"{where}: {_explain(config, name, value)}")


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


@cache
def _warn(message: str) -> None:
    logger.warning(message)


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
