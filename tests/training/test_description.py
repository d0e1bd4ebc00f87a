"""Descriptions of trainings: the options of the data that a training reads."""

from __future__ import annotations

from hf_spec.common.settings import setting_fields
from hf_spec.training.description import FeatureOptions, StartOptions, TeacherOptions, Training
from hf_spec.training.settings import TrainSettings

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


def test_options_are_explained() -> None:
    for kind in (TeacherOptions, FeatureOptions, StartOptions):
        assert all(setting.help for setting in setting_fields(kind))
