"""The strategies by name.

A strategy is one file: a frozen config dataclass and a drafter, tied together by `register`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.config import StrategyConfig
from hf_spec.engine.decode.drafter import Drafter

MakeDrafter = Callable[[Any, PreTrainedModel, Any], Drafter]
MakeForAuto = Callable[[PreTrainedModel, Any, str], Drafter]
Config = TypeVar("Config", bound=type[StrategyConfig])


@dataclass(frozen=True)
class _Strategy:
    config: type[StrategyConfig]
    make: MakeDrafter
    make_for_auto: MakeForAuto | None


_STRATEGIES: dict[str, _Strategy] = {}


def register(
    name: str, make_drafter: MakeDrafter, make_for_auto: MakeForAuto | None = None
) -> Callable[[Config], Config]:
    """Class decorator: make a config known as `spec_strategy=name`.

    Args:
        name: lower case, letters, digits and underscores, and not taken (`ValueError`).
        make_drafter: called with (config, target model, assistant) for every generation.
        make_for_auto: called with (target model, assistant, batching) where `auto` uses the
            strategy beside others: a drafter that draws nothing at random and proposes all that it
            can. By default it is that of the config without options.
    """

    def add(config_class: Config) -> Config:
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
            raise ValueError(f"strategy name {name!r} is not lower_case_with_underscores")
        if name in _STRATEGIES:
            owner = _STRATEGIES[name].config.__name__
            raise ValueError(f"strategy name {name!r} belongs to {owner} already")
        config_class.strategy = name
        _STRATEGIES[name] = _Strategy(config_class, make_drafter, make_for_auto)
        return config_class

    return add


def known_strategies() -> list[str]:
    """Names of all registered strategies, sorted."""
    return sorted(_STRATEGIES)


def parse_strategy(value: object) -> StrategyConfig:
    """Turn what the user passed as `spec_strategy` into a config.

    That is a name, a config, or the dictionary of one that a stored generation config holds; all
    else is an `OptionError`.
    """
    if isinstance(value, StrategyConfig) and value.strategy in _STRATEGIES:
        return value
    if isinstance(value, type) and issubclass(value, StrategyConfig):
        raise OptionError(
            f"spec_strategy={value.__name__} is a class; pass an object of it: {value.__name__}()"
        )
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        options = {str(key): option for key, option in value.items()}
        if "strategy" not in options:
            raise OptionError(
                f"spec_strategy={value!r:.80} has no key 'strategy', which names the strategy; "
                f"known: {', '.join(known_strategies())}"
            )
        value = options.pop("strategy")
    if not isinstance(value, str) or value not in _STRATEGIES:
        raise OptionError(
            f"unknown spec_strategy {value!r}; {choices(value, known_strategies())} "
            "(a name, or a config object such as hf_spec.LookupConfig())"
        )
    return _STRATEGIES[value].config(**options)


def make_drafter(config: StrategyConfig, target: PreTrainedModel, assistant: object) -> Drafter:
    """Build the drafter of a config for one generation."""
    return _STRATEGIES[config.strategy].make(config, target, assistant)


def make_for_auto(name: str, target: PreTrainedModel, assistant: object, batching: str) -> Drafter:
    """Build the drafter of a strategy as `auto` uses it beside others; see `register`."""
    strategy = _STRATEGIES[name]
    if strategy.make_for_auto is not None:
        return strategy.make_for_auto(target, assistant, batching)
    return strategy.make(strategy.config(batching=batching), target, assistant)
