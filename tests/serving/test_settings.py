"""Settings of a server: defaults and validation."""

from __future__ import annotations

import pytest

from hf_spec import OptionError
from hf_spec.serving.settings import ServeSettings, is_loopback


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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", True),
        ("LOCALHOST.", True),
        ("127.0.0.1", True),
        ("127.8.9.1", True),
        ("::1", True),
        ("0.0.0.0", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
    ],
)
def test_loopback_names(name: str, expected: bool) -> None:
    assert is_loopback(name) is expected
