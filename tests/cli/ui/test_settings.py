"""What the page may be told."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec.cli.ui.settings import UiSettings
from hf_spec.common.errors import OptionError


def test_by_default_the_page_is_on_this_machine_alone() -> None:
    assert UiSettings().host == "127.0.0.1"


@pytest.mark.parametrize("wrong", [{"max_new_tokens": 1}, {"port": 70000}, {"port": -1}])
def test_values_without_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(wrong))):
        UiSettings(**wrong)
