"""The modes that help lists are those that are served."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.models.adaptive_modes import MODES
from hf_spec.training.sdsat_student import SdsatTrainSettings


@pytest.mark.parametrize("mode", MODES)
def test_each_can_be_trained(mode: str) -> None:
    tokens = (96,) if mode == "full" else ()
    assert SdsatTrainSettings(mode=mode, token_ids=tokens).mode == mode


def test_another_is_answered_with_all() -> None:
    with pytest.raises(OptionError, match=", ".join(MODES)):
        SdsatTrainSettings(mode="half")
