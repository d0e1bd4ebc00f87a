"""The registry of strategies and the checks of their options."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import hf_spec
from hf_spec import DraftConfig, LookupConfig, OptionError, StrategyConfig, TreeConfig
from hf_spec.strategies import base
from hf_spec.strategies.base import known_strategies, make_drafter, parse_strategy, register


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    configs, makers = dict(base._CONFIGS), dict(base._MAKERS)
    yield
    base._CONFIGS.clear()
    base._CONFIGS.update(configs)
    base._MAKERS.clear()
    base._MAKERS.update(makers)


def maker(config: Any, target: Any, assistant: Any) -> Any:
    return config, target, assistant


class TestRegister:
    def test_a_new_name_is_known_at_once(self) -> None:
        @register("echo_2", maker)
        @dataclass(frozen=True)
        class EchoConfig(StrategyConfig):
            length: int = 3

        assert "echo_2" in known_strategies()
        assert parse_strategy("echo_2") == EchoConfig()
        config = parse_strategy({"strategy": "echo_2", "length": 5})
        assert config == EchoConfig(length=5)
        assert make_drafter(config, "target", "assistant") == (config, "target", "assistant")

    def test_a_taken_name(self) -> None:
        with pytest.raises(ValueError, match="'lookup' belongs to LookupConfig already"):
            register("lookup", maker)(StrategyConfig)
        assert base._CONFIGS["lookup"] is LookupConfig

    @pytest.mark.parametrize("name", ["Lookup", "two-words", "", "2nd", "a b", "_a"])
    def test_a_badly_formed_name(self, name: str) -> None:
        with pytest.raises(ValueError, match="not lower_case_with_underscores"):
            register(name, maker)(StrategyConfig)


class TestParse:
    def test_a_config_is_taken_as_it_is(self) -> None:
        config = TreeConfig(children=2)
        assert parse_strategy(config) is config

    def test_a_name_means_the_defaults(self) -> None:
        assert parse_strategy("lookup") == LookupConfig()

    @pytest.mark.parametrize(
        "value", ["lokup", "Lookup", 1, None, True, {}, {"strategy": ["lookup"]}]
    )
    def test_unknown(self, value: Any) -> None:
        with pytest.raises(OptionError, match=r"known: .*draft, .*lookup"):
            parse_strategy(value)

    def test_the_base_class_is_no_strategy(self) -> None:
        with pytest.raises(OptionError, match="unknown spec_strategy"):
            parse_strategy(StrategyConfig())

    def test_unknown_options(self) -> None:
        with pytest.raises(OptionError, match=r"no option size, width; known: .*copy_length"):
            parse_strategy({"strategy": "lookup", "width": 1, "size": 2})
        with pytest.raises(OptionError, match="no option 3"):
            parse_strategy({"strategy": "lookup", 3: 1})

    def test_a_config_of_a_subclass_without_a_name_of_its_own(self) -> None:
        class Mine(LookupConfig):
            pass

        assert parse_strategy(Mine()) == Mine()


@pytest.mark.parametrize("name", known_strategies())
class TestEveryStrategy:
    def test_to_dict_goes_through_json_and_back(self, name: str) -> None:
        config = parse_strategy(name)
        stored = json.loads(json.dumps(config.to_dict()))
        assert stored["strategy"] == name
        assert parse_strategy(stored) == config

    def test_the_config_is_frozen_documented_and_public(self, name: str) -> None:
        config = parse_strategy(name)
        kind = type(config)
        assert getattr(hf_spec, kind.__name__) is kind
        with pytest.raises(dataclasses.FrozenInstanceError):
            config.anything = 1  # type: ignore[attr-defined]
        described = "".join(
            base_class.__doc__ or "" for base_class in kind.__mro__ if base_class is not object
        )
        missing = [f.name for f in dataclasses.fields(kind) if f"{f.name}:" not in described]
        assert not missing

    @pytest.mark.parametrize("value", [None, "x", [], {}, -1, 1.5, 10**30])
    def test_wrong_values_are_option_errors_or_taken(self, name: str, value: Any) -> None:
        kind = type(parse_strategy(name))
        for field in dataclasses.fields(kind):
            with contextlib.suppress(OptionError):
                assert getattr(kind(**{field.name: value}), field.name) == value


class TestCheck:
    @pytest.mark.parametrize("value", [0, 65, True, 2.0, "2", None])
    def test_whole_numbers(self, value: Any) -> None:
        with pytest.raises(OptionError, match=r"must be a whole number between 1 and 64"):
            LookupConfig(match_length=value)

    @pytest.mark.parametrize("value", [-0.1, 1.1, float("nan"), True, "0.5"])
    def test_probabilities(self, value: Any) -> None:
        with pytest.raises(OptionError, match="must be a number between 0 and 1"):
            DraftConfig(confidence_threshold=value)

    def test_the_limits_themselves_are_fine(self) -> None:
        LookupConfig(match_length=64, min_match_length=1)
        DraftConfig(confidence_threshold=0)
        DraftConfig(confidence_threshold=1)


@pytest.mark.parametrize("name", known_strategies())
def test_every_config_names_its_options(name: str) -> None:
    config_class = base._CONFIGS[name]
    fields = sorted(option.name for option in dataclasses.fields(config_class))
    message = f"{config_class.__name__} has no option batchin; did you mean 'batching'? known: "
    with pytest.raises(OptionError) as raised:
        config_class(batchin="padded")
    assert str(raised.value) == message + ", ".join(fields)
    # What copies and stores configs goes on.
    config = config_class()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, batching="padded").batching == "padded"
