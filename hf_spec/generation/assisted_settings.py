"""Settings of transformers' assisted generation, which strategies replace by options of their own.

A call that sets one raises. A checkpoint may have such values in its generation config without
anybody having asked for them in this call, so those that differ from the defaults are a warning.
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

# Setting -> the options that replace it, in order of preference; none where nothing is to be set.
REPLACED_BY: dict[str, tuple[str, ...]] = {
    "num_assistant_tokens": ("max_draft_tokens", "num_adaptive"),
    "num_assistant_tokens_schedule": ("length_policy",),
    "assistant_confidence_threshold": ("confidence_threshold",),
    "max_matching_ngram_size": ("match_length",),
    "assistant_lookbehind": (),
    "target_lookbehind": (),
}
# Schedule of transformers -> the length policy that does the same.
POLICIES = {"constant": "static", "heuristic": "heuristic", "heuristic_transient": "heuristic"}


def check_assisted(
    config: StrategyConfig, model: PreTrainedModel, arguments: Mapping[str, Any]
) -> None:
    """Reject settings of assisted generation in a call that has a strategy.

    Args:
        config: the strategy.
        model: the target. What its generation config stores is a warning at most.
        arguments: the arguments of `generate()` by name.

    Raises:
        OptionError: names the setting and the option that replaces it.
    """
    stored = getattr(model, "generation_config", None)
    given = arguments.get("generation_config")
    for name in REPLACED_BY:
        value = arguments.get(name)
        if value is None and getattr(given, name, None) != getattr(stored, name, None):
            # A copy of the model's own config adds nothing to it.
            value = _unusual(given, name)
        if value is not None:
            raise OptionError(_explain(config, name, value))
    warn_of_stored(config, "model.generation_config", stored)


def warn_of_stored(config: StrategyConfig, where: str, stored: Any) -> None:
    """Warn once of settings of assisted generation that a model's generation config holds."""
    for name in REPLACED_BY:
        if (value := _unusual(stored, name)) is not None:
            _warn(f"{where}: {_explain(config, name, value)}")


def generation_configs(assistant: Any) -> Iterator[Any]:
    """Yield the generation configs of the models that an assistant is, or is a list of."""
    for one in assistant if isinstance(assistant, (list, tuple)) else [assistant]:
        if (stored := getattr(one, "generation_config", None)) is not None:
            yield stored


def _unusual(config: Any, name: str) -> Any:
    """Return a setting that is neither unset nor a default, which many files store; else None."""
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
    way_out = "leave it out"
    if option is not None:
        chosen = {option: POLICIES.get(value, value) if option == "length_policy" else value}
        if option == "confidence_threshold":
            chosen = {"length_policy": "confidence", **chosen}
        said = ", ".join(f"{key}={setting!r}" for key, setting in chosen.items())
        way_out = f"use spec_strategy={type(config).__name__}({said})"
    return (
        f"{name}={value!r} is a setting of transformers' assisted generation, which "
        f"spec_strategy={config.strategy!r} does not read: {way_out}"
    )
