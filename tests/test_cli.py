"""The command line: what it offers, and what it says when its packages are missing."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec import cli


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(cli.build_app(), ["--help"])
    assert result.exit_code == 0
    for command in ("demo", "train", "calibrate"):
        assert command in result.output


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert "typer and rich" in str(stopped.value)
    assert "hf-spec[demo]" in str(stopped.value)


@pytest.mark.parametrize("arguments", [["--repeats", "0"], ["--max-new-tokens", "x"]])
def test_bad_numbers_are_refused_before_any_model(arguments: list[str]) -> None:
    result: Any = CliRunner().invoke(cli.build_app(), ["demo", *arguments])
    assert result.exit_code == 2
