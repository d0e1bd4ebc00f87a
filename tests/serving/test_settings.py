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


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_no_machine_has(port: int) -> None:
    with pytest.raises(OptionError, match=f"port={port} must be a whole number between 0 and"):
        ServeSettings(port=port)
