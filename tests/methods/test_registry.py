"""The registry of strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from hf_spec import AutoConfig, LookupConfig, OptionError, StrategyConfig, TreeConfig
from hf_spec.methods import registry
from hf_spec.methods.registry import (
    known_strategies,
    make_drafter,
    make_for_auto,
    parse_strategy,
    register,
)


@pytest.fixture(autouse=True)
def registry_as_it_was() -> Iterator[None]:
    copy = dict(registry._STRATEGIES)
    yield
    registry._STRATEGIES.clear()
    registry._STRATEGIES.update(copy)


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
        assert type(parse_strategy("lookup")) is LookupConfig

    def test_other_names(self) -> None:
        @register("echo_5", maker, aliases=("echo", "sound"))
        @dataclass(frozen=True)
        class EchoConfig(StrategyConfig):
            length: int = 3

        assert parse_strategy("echo") == parse_strategy("sound") == EchoConfig()
        assert parse_strategy({"strategy": "echo", "length": 5}) == EchoConfig(length=5)
        assert parse_strategy("echo").strategy == "echo_5"
        assert not {"echo", "sound"} & set(known_strategies())

    @pytest.mark.parametrize("name", ["medusa", "heads"])
    def test_a_taken_other_name(self, name: str) -> None:
        for arguments in ((name, maker), ("echo_6", maker, None, (name,))):
            with pytest.raises(ValueError, match=f"{name!r} belongs to HeadsConfig already"):
                register(*arguments)(StrategyConfig)
        with pytest.raises(ValueError, match="not lower_case_with_underscores"):
            register("echo_6", maker, aliases=("two-words",))(StrategyConfig)
        assert "echo_6" not in known_strategies()

    @pytest.mark.parametrize("name", ["Lookup", "two-words", "", "2nd", "a b", "_a"])
    def test_a_badly_formed_name(self, name: str) -> None:
        with pytest.raises(ValueError, match="not lower_case_with_underscores"):
            register(name, maker)(StrategyConfig)

    def test_auto_gets_the_default_drafter_or_one_made_for_it(self) -> None:
        for_auto: list[Any] = [None, lambda *given: given]
        made: list[Any] = []
        auto = AutoConfig(batching="padded")
        for name, make in zip(("echo_3", "echo_4"), for_auto, strict=True):
            config = dataclass(frozen=True)(type("EchoConfig", (StrategyConfig,), {}))
            register(name, maker, make)(config)
            made.append(make_for_auto(name, "target", "assistant", auto))  # type: ignore[arg-type]
        assert made[0][0].batching == "padded"
        assert made[0][1:] == ("target", "assistant")
        assert made[1] == ("target", "assistant", auto)


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
