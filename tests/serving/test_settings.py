"""What a server may be told."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.serving.settings import ServeSettings


def test_it_listens_to_this_machine_alone_unless_told_otherwise() -> None:
    assert ServeSettings().host == "127.0.0.1"


@pytest.mark.parametrize("name", ["max_batch", "max_waiting", "max_length"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(OptionError, match=name):
        ServeSettings(**{name: 0})
