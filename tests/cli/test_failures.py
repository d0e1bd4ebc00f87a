"""Failing commands: one-line message and exit status for users, a traceback for bugs."""

from __future__ import annotations

from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from hf_spec import AssistantError, HubError, OptionError, UnsupportedError
from hf_spec.cli import app as root
from hf_spec.cli.failures import exit_with_message


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (OptionError("k=0 is [bold]too[/] small"), 2),
        (AssistantError("no such head"), 2),
        (HubError("the Hub cannot be reached"), 1),
        (UnsupportedError("no such model is served"), 1),
        (FileNotFoundError("no such file"), 2),
        (ValueError("a bad line"), 1),
        (OSError("no space"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_status_and_sentence(
    error: BaseException, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as stopped, exit_with_message():
        raise error
    assert stopped.value.exit_code == status
    assert capsys.readouterr().err == (f"error: {error}\n" if str(error) else "")


@pytest.mark.parametrize("error", [ZeroDivisionError(), BrokenPipeError(), AttributeError("x")])
def test_mistakes_in_the_code_keep_their_traceback(error: Exception) -> None:
    with pytest.raises(type(error)), exit_with_message():
        raise error


def test_debug_shows_where() -> None:
    with pytest.raises(OptionError), exit_with_message(debug=True):
        raise OptionError("k=0")


class TestCommandLine:
    @pytest.fixture(autouse=True)
    def failing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail() -> None:
            raise AssistantError("no such head")

        app = typer.Typer()
        app.command()(fail)
        monkeypatch.setattr(root, "load_command", lambda name: typer.main.get_command(app))

    def run(self, *arguments: str, **environment: str) -> Any:
        return CliRunner().invoke(root.build_app(), [*arguments, "demo"], env=environment)

    def test_the_root_catches(self) -> None:
        result = self.run()
        assert (result.exit_code, result.stderr) == (2, "error: no such head\n")

    def test_debug_by_option_or_environment(self) -> None:
        for result in (self.run("--debug"), self.run(HF_SPEC_DEBUG="1")):
            assert isinstance(result.exception, AssistantError)
