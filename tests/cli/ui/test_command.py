"""`hf-spec ui` up to the start of the page; tests/integrations/test_ui.py tests the page."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.cli.answer.conftest import folder  # noqa: F401 - a fixture


def installed(monkeypatch: pytest.MonkeyPatch, gradio: bool) -> None:
    """Pretend that Gradio is or is not installed."""
    find = importlib.util.find_spec

    def pretend(name: str, package: str | None = None) -> Any:
        if name == "gradio":
            return object() if gradio else None
        return find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", pretend)


def test_without_gradio_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, gradio=False)
    result = CliRunner().invoke(build_app(), ["ui", "no/model"])
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert 'the page needs gradio: run pip install ".[ui]"' in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/model", "--strategy", "lokup"], "lookup"),
        (["no/model", "--strategy", "tree"], "needs --assistant"),
        (["./no-such-folder"], "no-such-folder"),
        (["FOLDER", "--assistant", "./no-such-head"], "no-such-head"),
        (["FOLDER", "--port", "70000"], "65535"),
        (["FOLDER", "--max-new-tokens", "1"], "max-new-tokens"),
    ],
)
def test_mistakes_are_told_before_there_is_a_page(
    arguments: list[str],
    message: str,
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    installed(monkeypatch, gradio=True)
    given = [str(folder) if word == "FOLDER" else word for word in arguments]
    result = CliRunner().invoke(build_app(), ["ui", *given])
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
