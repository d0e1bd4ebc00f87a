"""Settings of DISCO classifiers: accepted and rejected values, and the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import setting_fields
from hf_spec.methods.disco.settings import FEATURES, TOP, DiscoTrainSettings


def test_features_cover_what_the_classifier_sees() -> None:
    columns = list(range(TOP + 2))
    assert [column for group in FEATURES.values() for column in columns[group]] == columns


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        (s.name, s.choices)
        for s in setting_fields(DiscoTrainSettings)
        if s.choices and s.name != "mode"
    ],
)
def test_each_choice_is_taken_and_no_other(name: str, choices: tuple[str, ...]) -> None:
    settings: Any = DiscoTrainSettings
    assert len(choices) > 1
    for choice in choices:
        assert getattr(settings(**{name: choice}), name) == choice
    with pytest.raises(OptionError, match=f"{name}='nonsense': choose one of {choices[0]}"):
        settings(**{name: "nonsense"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"validation_share": 0.0},
        {"validation_share": 1},
    ],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        DiscoTrainSettings(**wrong)


def test_defaults() -> None:
    assert DiscoTrainSettings().labels == "hard"
