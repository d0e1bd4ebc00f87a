"""Settings of EAGLE-3 heads: rejected values and the defaults."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.methods.eagle.settings import EAGLE_RUN, EagleTrainSettings


@pytest.mark.parametrize("wrong", [{"steps": 0}, {"step_weight": 0.0}, {"step_weight": 1.5}])
def test_wrong_values(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        EagleTrainSettings(**wrong)


def test_defaults() -> None:
    assert (EAGLE_RUN.epochs, EagleTrainSettings().steps) == (4, 4)
