"""Settings for training DFlash heads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.methods.block.settings import BlockTrainSettings

SETTINGS = BlockTrainSettings()


@pytest.mark.parametrize("changes", [{"block_size": 1}, {"decay": 0.0}])
def test_settings_out_of_range(changes: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(changes))):
        replace(SETTINGS, **changes)
