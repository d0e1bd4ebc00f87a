"""Training settings of MTP modules."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.methods.mtp.settings import MtpTrainSettings


def test_a_draft_token_must_weigh_something() -> None:
    with pytest.raises(OptionError, match="step_weight=0"):
        MtpTrainSettings(step_weight=0.0)


def test_counts_are_positive() -> None:
    with pytest.raises(OptionError, match="steps"):
        MtpTrainSettings(steps=0)
