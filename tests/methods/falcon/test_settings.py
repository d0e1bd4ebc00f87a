"""Settings of Falcon heads: accepted and rejected values, and the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import setting_fields
from hf_spec.methods.falcon.settings import (
    FALCON_RUN,
    CsgdSettings,
    FalconShape,
    FalconTrainSettings,
)


@pytest.mark.parametrize(
    ("name", "choices"),
    [(s.name, s.choices) for s in setting_fields(CsgdSettings) if s.choices and s.name != "mode"],
)
def test_each_choice_is_taken_and_no_other(name: str, choices: tuple[str, ...]) -> None:
    settings: Any = CsgdSettings
    assert len(choices) > 1
    for choice in choices:
        assert getattr(settings(**{name: choice}), name) == choice
    with pytest.raises(OptionError, match=f"{name}='nonsense': choose one of {choices[0]}"):
        settings(**{name: "nonsense"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"soft_weight": -1.0},
        {"own_features": 1.5},
        {"soft_temperature": 0.0},
    ],
)
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        CsgdSettings(**wrong)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"block_size": 5}, "block_size=5 must be a whole number between 1 and 4"),
        ({"block_size": True}, "block_size=True must be a whole number"),
        ({"num_layers": 0}, "num_layers=0 must be a whole number of at least 1"),
        ({"recurrent": 1}, "recurrent=1 must be True or False"),
        ({"dropout": 1.0}, "dropout=1.0 must be below 1"),
        ({"dropout": "0"}, "dropout='0' must be a number between 0 and 1"),
    ],
)
def test_a_head_that_cannot_be_built(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        FalconShape(**wrong)


def test_defaults() -> None:
    assert (FALCON_RUN.epochs, FALCON_RUN.learning_rate, FALCON_RUN.batch_tokens) == (8, 2e-3, 2048)
    assert (FalconTrainSettings().vocabulary_size, FalconTrainSettings().max_context) == (8192, 64)


def test_the_share_of_glanced_inputs_by_epoch() -> None:
    paper, released = CsgdSettings(), CsgdSettings(schedule="released")
    assert [paper.share(e, 4) for e in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [released.share(e, 7) for e in (0, 6)] == pytest.approx([0.45, 0.15])
    assert CsgdSettings(schedule="off").share(0, 4) == 0
    steps = CsgdSettings(schedule="steps")
    assert [steps.share(0, 1, done) for done in (0, 0.5, 1)] == pytest.approx([0.4, 0.2, 0])
