"""The root of the command line: what it offers, what it does not import, what each help says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_spec.cli
from hf_spec.cli.app import ENTRIES, build_app, load_command
from hf_spec.installing import how_to_install

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "command-line.md"


def leaves(command: Any, name: str) -> dict[str, Any]:
    """Every command that does something, by its full name."""
    below = getattr(command, "commands", None)
    if below is None:
        return {name: command}
    found = [leaves(one, f"{name} {key}") for key, one in below.items()]
    return {key: one for group in found for key, one in group.items()}


LEAVES = {key: one for name in ENTRIES for key, one in leaves(load_command(name), name).items()}

MODULES = {entry.module for entry in ENTRIES.values()} | {"matplotlib"}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_no_command_is_imported_before_it_is_chosen() -> None:
    code = (
        "import sys; from hf_spec.cli.app import build_app; from typer.testing import CliRunner\n"
        "for asked in (['--help'], ['nonsense'], []):\n"
        "    page = CliRunner().invoke(build_app(), asked).output\n"
        f"    print('generate' in page, *{MODULES} & set(sys.modules))"
    )
    assert run_python(code).splitlines() == ["True", "False", "True"]


def test_completion_imports_no_command() -> None:
    code = (
        "import os, sys; os.environ.update(_HF_SPEC_COMPLETE='complete_bash', "
        "COMP_WORDS='hf-spec ca', COMP_CWORD='1'); sys.argv = ['hf-spec']; import hf_spec.cli; "
        "import atexit; atexit.register("
        f"lambda: print({MODULES}.isdisjoint(sys.modules))); hf_spec.cli.main()"
    )
    assert set(run_python(code).split()) >= {"calibrate", "True"}


def test_python_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_spec", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: hf-spec" in done.stdout


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        hf_spec.cli.main()
    assert "rich and typer and yaml" in str(stopped.value)
    assert how_to_install("cli") in str(stopped.value)


@pytest.mark.parametrize("name", ENTRIES)
def test_summaries_are_the_first_lines_of_the_helps(name: str) -> None:
    paragraph = (load_command(name).help or "").split("\n\n")[0]
    assert " ".join(paragraph.split()) == ENTRIES[name].summary


@pytest.mark.parametrize("name", LEAVES)
def test_every_help_teaches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    page = CliRunner().invoke(build_app(), [*name.split(), "--help"]).output
    assert f"  hf-spec {name} " in page, "an example"
    assert "--config" in page
    for parameter in LEAVES[name].params:
        assert parameter.help, f"{parameter.name} is not explained"


def test_brackets_of_a_help_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    page = CliRunner().invoke(build_app(), ["verify", "--help"]).output
    assert "NAME[:OPTION=JSON,...][@ASSISTANT]" in page


def test_a_wrong_name_is_answered_with_the_near_one() -> None:
    result = CliRunner().invoke(build_app(), ["generat"])
    assert result.exit_code == 2
    assert "Did you mean 'generate'" in " ".join(result.output.replace("│", " ").split())


def test_the_page_has_every_command() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name in LEAVES:
        assert f"hf-spec {name}" in page
