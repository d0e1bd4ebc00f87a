"""What help lists is what the settings take."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.training.choices import CSGD, LAYOUTS, LOSSES, MODES
from hf_spec.training.csgd import CsgdSettings
from hf_spec.training.sdsat_student import SdsatTrainSettings


@pytest.mark.parametrize(
    ("settings", "name", "choices"),
    [
        *((CsgdSettings, name, choices) for name, choices in CSGD.items()),
        (SdsatTrainSettings, "layout", LAYOUTS),
        (SdsatTrainSettings, "loss", LOSSES),
    ],
)
def test_each_is_taken_and_no_other(settings: Any, name: str, choices: tuple[str, ...]) -> None:
    for choice in choices:
        assert getattr(settings(**{name: choice}), name) == choice
    with pytest.raises(OptionError, match="choose .*".join(["", choices[0]])):
        settings(**{name: "nonsense"})


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_can_be_trained(mode: str) -> None:
    tokens = (96,) if mode == "full" else ()
    assert SdsatTrainSettings(mode=mode, token_ids=tokens).mode == mode


def test_another_mode_is_answered_with_all() -> None:
    with pytest.raises(OptionError, match=", ".join(MODES)):
        SdsatTrainSettings(mode="half")
