"""`hf-spec chat` from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hf_spec.cli.app import build_app


def run(*arguments: Any, stdin: str = "") -> Any:
    return CliRunner().invoke(build_app(), ["chat", *map(str, arguments)], input=stdin)


def test_a_conversation(folder: Path) -> None:
    options = ("--strategy", "lookup", "--max-new-tokens", 8, "--system", "w90")
    result = run(folder, *options, stdin="w11 w12 w13\n/stats\n/exit\n")
    assert result.exit_code == 0, result.output
    assert "lookup; /help lists the commands" in result.output
    assert "last answer" in result.output


def test_the_end_of_the_input_ends_it(folder: Path) -> None:
    result = run(folder, "--strategy", "none", "--max-new-tokens", 4, stdin="w11\n")
    assert result.exit_code == 0, result.output


def test_a_wrong_strategy(folder: Path) -> None:
    result = run(folder, "--strategy", "nonsense")
    assert result.exit_code == 2
    assert "unknown spec_strategy 'nonsense'" in result.stderr


def test_ctrl_c_at_the_prompt_ends_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: Any, **__: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Console, "input", interrupt)
    assert run(folder, "--strategy", "none").exit_code == 130
