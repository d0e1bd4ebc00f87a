"""Settings of trainings: what they take and refuse, and the defaults that users have."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import described
from hf_spec.training.settings import (
    DRAFT_RUN,
    FALCON_RUN,
    SDSAT_RUN,
    CsgdSettings,
    DiscoTrainSettings,
    DraftTrainSettings,
    FalconTrainSettings,
    ResponseSettings,
    SdsatTrainSettings,
    TrainSettings,
)

SETTINGS = (CsgdSettings, DiscoTrainSettings, SdsatTrainSettings)


@pytest.mark.parametrize(
    ("settings", "name", "choices"),
    [
        (kind, setting.name, setting.choices)
        for kind in SETTINGS
        for setting in described(kind)
        if setting.choices and setting.name != "mode"
    ],
)
def test_each_choice_is_taken_and_no_other(
    settings: Any, name: str, choices: tuple[str, ...]
) -> None:
    assert len(choices) > 1
    for choice in choices:
        assert getattr(settings(**{name: choice}), name) == choice
    with pytest.raises(OptionError, match=f"{name}='nonsense': choose one of {choices[0]}"):
        settings(**{name: "nonsense"})


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [
        (CsgdSettings, {"soft_weight": -1.0}),
        (CsgdSettings, {"own_features": 1.5}),
        (CsgdSettings, {"soft_temperature": 0.0}),
        (SdsatTrainSettings, {"mode": "partial"}),
        (SdsatTrainSettings, {"window": 0}),
        (SdsatTrainSettings, {"rank": 1.5}),
        (SdsatTrainSettings, {"start_share": 2}),
        (SdsatTrainSettings, {"infilling": -0.5}),
        (SdsatTrainSettings, {"infilling_markers": ("<a>", "<b>")}),
        (SdsatTrainSettings, {"infilling_markers": ("<a>", "<b>", "<a>")}),
        (SdsatTrainSettings, {"evaluated_positions": 0}),
        (SdsatTrainSettings, {"layout": "branches", "mode": "lora"}),
        (SdsatTrainSettings, {"layout": "branches", "loss": "basic"}),
        (SdsatTrainSettings, {"token_ids": (1, 2), "mode": "full"}),
        (DiscoTrainSettings, {"validation_share": 0.0}),
        (DiscoTrainSettings, {"validation_share": 1}),
        (DraftTrainSettings, {"vocabulary_size": 0}),
        (TrainSettings, {"epochs": 0}),
        (ResponseSettings, {"temperature": -1.0}),
    ],
)
def test_wrong_values(settings: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        settings(**wrong)


def test_what_users_have_by_default() -> None:
    runs = [(run.epochs, run.learning_rate) for run in (DRAFT_RUN, FALCON_RUN, SDSAT_RUN)]
    assert runs == [(3, 2e-3), (8, 2e-3), (3, 1e-3)]
    assert {run.batch_tokens for run in (DRAFT_RUN, FALCON_RUN, SDSAT_RUN)} == {2048}
    assert (FalconTrainSettings().vocabulary_size, FalconTrainSettings().max_context) == (8192, 64)
    assert DiscoTrainSettings().labels == "hard"
    # As in the paper of SDSAT.
    assert (SDSAT_RUN.warm_up, SdsatTrainSettings().start_share) == (0.2, 0.1)


def test_the_share_of_glanced_inputs_by_epoch() -> None:
    paper, released = CsgdSettings(), CsgdSettings(schedule="released")
    assert [paper.share(e, 4) for e in range(4)] == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert [released.share(e, 7) for e in (0, 6)] == pytest.approx([0.45, 0.15])
    assert CsgdSettings(schedule="off").share(0, 4) == 0
    steps = CsgdSettings(schedule="steps")
    assert [steps.share(0, 1, done) for done in (0, 0.5, 1)] == pytest.approx([0.4, 0.2, 0])


def test_the_rate_rises_and_falls() -> None:
    settings = TrainSettings(learning_rate=1.0, warm_up=0.1)
    rates = [settings.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
