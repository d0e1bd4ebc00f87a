"""Settings shared by all trainings."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.common.settings import setting_fields
from hf_spec.methods.trainings import known_trainings
from hf_spec.training.settings import (
    DraftVocabularySettings,
    FeatureOptions,
    HeadSettings,
    ResponseSettings,
    StartOptions,
    TeacherOptions,
    Training,
    TrainSettings,
)


@pytest.mark.parametrize(
    ("settings", "wrong"),
    [(TrainSettings, {"epochs": 0}), (ResponseSettings, {"temperature": -1.0})],
)
def test_wrong_values(settings: Any, wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        settings(**wrong)


def test_the_rate_rises_and_falls() -> None:
    settings = TrainSettings(learning_rate=1.0, warm_up=0.1)
    rates = [settings.rate(step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == pytest.approx(1.0)
    assert rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)


def test_a_training_without_a_default_rate_needs_one() -> None:
    with pytest.raises(OptionError, match="learning_rate=None"):
        TrainSettings(learning_rate=None).rate(0, 10)


ANSWERS_ONLY = Training("try", "Try.", TrainSettings, "module:function", "the adapter", "none")


def test_options_follow_from_what_is_read() -> None:
    for reads, options in (
        ({}, None),
        ({"teacher": True}, TeacherOptions),
        ({"features": "last"}, FeatureOptions),
        ({"features": "fused"}, FeatureOptions),
    ):
        training = Training(**{**vars(ANSWERS_ONLY), **reads})
        assert training.data_options is options


def test_heads_share_settings() -> None:
    kinds = {training.name: training.settings for training in known_trainings()}
    for name in ("block", "eagle", "falcon", "medusa"):
        assert issubclass(kinds[name], DraftVocabularySettings)
    settings = kinds["mtp"](max_context=None)
    assert isinstance(settings, HeadSettings)
    assert not hasattr(settings, "vocabulary_size")
    # Settings of the method come first as positional arguments.
    assert kinds["eagle"](3, 0.5) == kinds["eagle"](steps=3, step_weight=0.5)


def test_options_are_explained() -> None:
    for kind in (TeacherOptions, FeatureOptions, StartOptions):
        assert all(setting.help for setting in setting_fields(kind))
