"""Settings of adaptive tokens: accepted and rejected values, and the defaults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import setting_fields
from hf_spec.methods.sdsat.settings import MODES, SDSAT_RUN, SdsatTrainSettings


@pytest.mark.parametrize("mode", MODES)
def test_each_can_be_trained(mode: str) -> None:
    tokens = (96,) if mode == "full" else ()
    assert SdsatTrainSettings(mode=mode, token_ids=tokens).mode == mode


def test_another_is_answered_with_all() -> None:
    with pytest.raises(OptionError, match=", ".join(MODES)):
        SdsatTrainSettings(mode="half")


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        (s.name, s.choices)
        for s in setting_fields(SdsatTrainSettings)
        if s.choices and s.name != "mode"
    ],
)
def test_each_choice_is_taken_and_no_other(name: str, choices: tuple[str, ...]) -> None:
    settings: Any = SdsatTrainSettings
    assert len(choices) > 1
    for choice in choices:
        assert getattr(settings(**{name: choice}), name) == choice
    with pytest.raises(OptionError, match=f"{name}='nonsense': choose one of {choices[0]}"):
        settings(**{name: "nonsense"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"mode": "partial"},
        {"window": 0},
        {"rank": 1.5},
        {"start_share": 2},
        {"infilling": -0.5},
        {"infilling_markers": ("<a>", "<b>")},
        {"infilling_markers": ("<a>", "<b>", "<a>")},
        {"evaluated_positions": 0},
        {"layout": "branches", "mode": "lora"},
        {"layout": "branches", "loss": "basic"},
        {"token_ids": (1, 2), "mode": "full"},
    ],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        SdsatTrainSettings(**wrong)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_has_its_learning_rate(mode: Any) -> None:
    settings = SdsatTrainSettings(mode=mode)
    resolved = settings.resolved_run(SDSAT_RUN)
    # The rate of mode full is the paper's.
    assert resolved.learning_rate == (5e-5 if mode == "full" else 1e-3)
    assert replace(resolved, learning_rate=None) == SDSAT_RUN
    chosen = replace(SDSAT_RUN, learning_rate=3e-4)
    assert settings.resolved_run(chosen) == chosen


def test_defaults() -> None:
    assert (SDSAT_RUN.epochs, SDSAT_RUN.learning_rate, SDSAT_RUN.batch_tokens) == (3, None, 2048)
    # As in the paper.
    assert (SDSAT_RUN.warm_up, SdsatTrainSettings().start_share) == (0.2, 0.1)
