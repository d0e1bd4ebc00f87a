"""Strategies by name: a frozen config dataclass and a function that makes its drafter."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from transformers import PreTrainedModel

from hf_spec.common.errors import OptionError, choices
from hf_spec.drafting.config import AssistantConfig, StrategyConfig
from hf_spec.engine.decode.drafter import Drafter

MakeDrafter = Callable[[Any, PreTrainedModel, Any], Drafter]
MakeForAuto = Callable[[PreTrainedModel, Any, AssistantConfig], Drafter]
Config = TypeVar("Config", bound=type[StrategyConfig])


class _Strategy(NamedTuple):
    config: type[StrategyConfig]
    make: MakeDrafter
    make_for_auto: MakeForAuto | None


# By name and by alias.
_STRATEGIES: dict[str, _Strategy] = {}


def register(
    name: str,
    make_drafter: MakeDrafter,
    make_for_auto: MakeForAuto | None = None,
    aliases: Sequence[str] = (),
) -> Callable[[Config], Config]:
    """Register the decorated config class as `spec_strategy=name`.

    Args:
        name: lower-case letters, digits and underscores.
        make_drafter: called with (config, target model, assistant) for every generation.
        make_for_auto: called with (target model, assistant, config of `auto`) when `auto` combines
            the strategy with others; returns a drafter that samples nothing and leaves the number
            of nodes to `auto`. Default: the drafter of the config without options.
        aliases: further names, which `parse_strategy` accepts and `known_strategies` leaves out.

    Raises:
        ValueError: if a name is malformed or taken.
    """

    def add(config_class: Config) -> Config:
        for new in (name, *aliases):
            if not re.fullmatch(r"[a-z][a-z0-9_]*", new):
                raise ValueError(f"strategy name {new!r} is not lower_case_with_underscores")
            if new in _STRATEGIES:
                owner = _STRATEGIES[new].config.__name__
                raise ValueError(f"strategy name {new!r} belongs to {owner} already")
        config_class.strategy = name
        strategy = _Strategy(config_class, make_drafter, make_for_auto)
        _STRATEGIES.update(dict.fromkeys((name, *aliases), strategy))
        return config_class

    return add


def known_strategies() -> list[str]:
    """Return the names of all registered strategies, sorted, without aliases."""
    return sorted({strategy.config.strategy for strategy in _STRATEGIES.values()})


def parse_strategy(value: object) -> StrategyConfig:
    """Return the config that the user passed as `spec_strategy`.

    `value` is a name, a config, or a config's dictionary from a stored generation config; anything
    else, and unknown names and options, raise `OptionError`.
    """
    if isinstance(value, StrategyConfig) and value.strategy in _STRATEGIES:
        return value
    if isinstance(value, type) and issubclass(value, StrategyConfig):
        raise OptionError(
            f"spec_strategy={value.__name__} is a class; pass an instance: {value.__name__}()"
        )
    options: dict[str, Any] = {}
    if isinstance(value, dict):
        options = {str(key): option for key, option in value.items()}
        if "strategy" not in options:
            raise OptionError(
                f"spec_strategy={value!r:.80} has no key 'strategy' with the name; "
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
    """Return the drafter of a config for one generation."""
    return _STRATEGIES[config.strategy].make(config, target, assistant)


def make_for_auto(
    name: str, target: PreTrainedModel, assistant: object, auto: AssistantConfig
) -> Drafter:
    """Return the drafter of a strategy that `auto` combines with others, see `register`."""
    config, make, for_auto = _STRATEGIES[name]
    if for_auto is not None:
        return for_auto(target, assistant, auto)
    return make(config(batching=auto.batching), target, assistant)
