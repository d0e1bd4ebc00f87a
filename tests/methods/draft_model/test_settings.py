"""Settings of trained draft models: rejected values and the defaults."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.methods.draft_model.settings import DRAFT_RUN, DraftTrainSettings


def test_wrong_values() -> None:
    with pytest.raises(OptionError, match="vocabulary_size"):
        DraftTrainSettings(vocabulary_size=0)


def test_defaults() -> None:
    assert (DRAFT_RUN.epochs, DRAFT_RUN.learning_rate, DRAFT_RUN.batch_tokens) == (3, 2e-3, 2048)
