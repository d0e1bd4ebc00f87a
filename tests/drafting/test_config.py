"""Strategy configs: common behavior and invalid values."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pickle
from typing import Any

import pytest

import hf_spec
from hf_spec import DraftConfig, LookupConfig, OptionError
from hf_spec.methods.registry import known_strategies, parse_strategy


@pytest.mark.parametrize("name", known_strategies())
class TestEveryStrategy:
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

    def test_wrong_values_are_option_errors_or_taken(self, name: str) -> None:
        kind = type(parse_strategy(name))
        values: tuple[Any, ...] = (None, "x", [], {}, -1, 1.5, 10**30)
        for field, value in itertools.product(dataclasses.fields(kind), values):
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
        DraftConfig(length_policy="confidence", confidence_threshold=0)
        DraftConfig(length_policy="confidence", confidence_threshold=1)


class TestContradictions:
    @pytest.mark.parametrize("policy", [None, "static", "heuristic", "measured"])
    @pytest.mark.parametrize(
        ("name", "value", "reader"),
        [
            ("confidence_threshold", 0.7, "confidence"),
            ("acceptance_threshold", 0.7, "disco"),
            ("adapter", "folder", "disco"),
        ],
    )
    def test_an_option_that_the_policy_does_not_read(
        self, name: str, value: Any, reader: str, policy: str | None
    ) -> None:
        match = f"{name}={value!r} is not used by length_policy={policy!r}.*'{reader}'"
        with pytest.raises(OptionError, match=match):
            DraftConfig(length_policy=policy, **{name: value})
        DraftConfig(length_policy=reader, **{name: value})

    def test_a_shortest_draft_above_the_longest(self) -> None:
        match = "min_draft_tokens=4 is larger than max_draft_tokens=3; lower it"
        with pytest.raises(OptionError, match=match):
            DraftConfig(min_draft_tokens=4, max_draft_tokens=3)
        DraftConfig(min_draft_tokens=3, max_draft_tokens=3)
        assert DraftConfig(min_draft_tokens=9).resolve(measures=False).max_draft_tokens == 9


@pytest.mark.parametrize("name", known_strategies())
def test_every_config_names_its_options(name: str) -> None:
    config_class = type(parse_strategy(name))
    fields = sorted(option.name for option in dataclasses.fields(config_class))
    message = f"{config_class.__name__} has no option batchin; did you mean 'batching'? known: "
    with pytest.raises(OptionError) as raised:
        config_class(batchin="padded")
    assert str(raised.value) == message + ", ".join(fields)
    # Configs can be copied and pickled.
    config = config_class()
    assert copy.deepcopy(config) == pickle.loads(pickle.dumps(config)) == config
    assert dataclasses.replace(config, batching="padded").batching == "padded"
