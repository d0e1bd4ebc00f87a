"""Training settings of Medusa heads."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.methods.medusa.settings import MedusaTrainSettings


def test_a_draft_token_must_weigh_something() -> None:
    with pytest.raises(OptionError, match="step_weight=0"):
        MedusaTrainSettings(step_weight=0.0)


def test_counts_are_positive() -> None:
    with pytest.raises(OptionError, match="num_heads"):
        MedusaTrainSettings(num_heads=0)
