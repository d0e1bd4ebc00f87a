"""The root of the command line: commands, deferred imports, and the help of each command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import hf_spec
import hf_spec.cli
from hf_spec.cli.app import COMMANDS, build_app, load_command

ROOT = Path(__file__).parents[2]


def leaves(command: Any, name: str) -> dict[str, Any]:
    """Return every leaf command by its full name."""
    below = getattr(command, "commands", None)
    if below is None:
        return {name: command}
    found = [leaves(one, f"{name} {key}") for key, one in below.items()]
    return {key: one for group in found for key, one in group.items()}


LEAVES = {key: one for name in COMMANDS for key, one in leaves(load_command(name), name).items()}

MODULES = {f"hf_spec.cli.{place.partition(':')[0]}" for place, _ in COMMANDS.values()} | {
    "matplotlib"
}


def run_python(code: str) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


ANSWERED_AT_ONCE = [
    [],
    ["--help"],
    ["--version"],
    ["nonsense"],
    ["train", "falcn"],
    ["train", "falcon", "--nois", "x"],
    ["verify", "model", "--dtype", "fp16"],
    ["bench", "./no-such-model"],
    ["train", "draft", "no/such/model"],
    *([*name.split(), "--help"] for name in LEAVES),
]


def test_help_and_wrong_names_import_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; sys.argv = ['hf-spec']; from hf_spec.cli import main\n"
        f"for words in {ANSWERED_AT_ONCE}:\n"
        "    sys.argv = ['hf-spec', *words]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as stopped:\n"
        "        heavy = {'torch', 'transformers', 'numpy', 'peft', 'accelerate'}\n"
        "        print('ENDS', stopped.code, heavy & set(sys.modules))"
    )
    ends = [line for line in run_python(code).splitlines() if line.startswith("ENDS")]
    statuses = [2, 0, 0, 2, 2, 2, 2, 2, 2]
    statuses += [0] * (len(ANSWERED_AT_ONCE) - len(statuses))
    assert ends == [f"ENDS {status} set()" for status in statuses]


def test_completion_imports_no_command() -> None:
    code = (
        "import os, sys; os.environ.update(_HF_SPEC_COMPLETE='complete_bash', "
        "COMP_WORDS='hf-spec ca', COMP_CWORD='1'); sys.argv = ['hf-spec']; import hf_spec.cli; "
        "import atexit; atexit.register("
        f"lambda: print({MODULES | {'torch'}}.isdisjoint(sys.modules))); hf_spec.cli.main()"
    )
    assert set(run_python(code).split()) >= {"calibrate", "True"}


def test_python_m() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hf_spec", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: hf-spec" in done.stdout
    command = [sys.executable, "-X", "importtime", "-m", "hf_spec", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "typer" in imported
    assert not imported & {"torch", "transformers"}


def test_the_versions() -> None:
    result = CliRunner().invoke(build_app(), ["--version"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"hf-spec {hf_spec.__version__} (torch ")
    assert "transformers" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_summaries_are_the_first_lines_of_the_helps(name: str) -> None:
    paragraph = (load_command(name).help or "").split("\n\n")[0]
    assert " ".join(paragraph.split()) == COMMANDS[name][1]


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
    result = CliRunner().invoke(build_app(), ["train", "falcon", "--nois", "x"])
    assert result.exit_code == 2
    assert "--noise" in result.output
