"""`--config`: values from a YAML file, which command-line options override."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command

from hf_spec.cli.config_file import add_config_option

app = typer.Typer()


@app.command()
def work(
    model: str,
    responses: Annotated[list[str], typer.Option()],
    steps: Annotated[int, typer.Option(min=1)] = 10,
    rate: float = 1e-3,
    store: bool = True,
    use_all: Annotated[bool, typer.Option("--all")] = False,
    out: Path | None = None,
    as_json: Annotated[bool, typer.Option("--json")] = False,
) -> None:
    """Print the values of one parameter of each kind."""
    typer.echo(f"{model} {responses} {steps} {rate} {store} {use_all} {out} {as_json}")


@app.command()
def other() -> None:
    """Do nothing; a second command turns the app into a group."""


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    command = get_command(app)
    for one in command.commands.values():  # type: ignore[attr-defined]
        add_config_option(one)

    def run(text: str, *arguments: str) -> tuple[int, str]:
        path = tmp_path / "config.yaml"
        path.write_text(text, encoding="utf-8")
        with pytest.raises(SystemExit) as stopped:
            command.main(["work", "--config", str(path), *arguments], "hf-spec")
        printed = capsys.readouterr()
        page = (printed.out + printed.err).replace("│", " ")
        return int(stopped.value.code or 0), " ".join(page.split())

    return run


FULL = """
model: some/model
responses: [a.jsonl, b.jsonl]
steps: 20
rate: 1e-2
store: false
all: true
out: ~
json: yes
"""


def test_values_of_every_kind(run: Any) -> None:
    assert run(FULL) == (0, "some/model ['a.jsonl', 'b.jsonl'] 20 0.01 False True None True")


def test_the_command_line_overrides_the_file(run: Any) -> None:
    given = ("mine", "--responses", "c", "--steps", "3", "--store", "--out", "here")
    assert run(FULL, *given) == (0, "mine ['c'] 3 0.01 True True here True")


def test_a_single_value_is_a_list_of_one(run: Any) -> None:
    assert run("model: m\nresponses: a.jsonl") == (
        0,
        "m ['a.jsonl'] 10 0.001 True False None False",
    )


@pytest.mark.parametrize("key", ["as-json", "as_json", "use_all", "no-store"])
def test_keys_are_names_of_options_not_of_code(run: Any, key: str) -> None:
    status, page = run(f"{key}: true")
    assert status == 2
    assert f"work has no option '{key}'" in page


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stps: 3", "work has no option 'stps'; did you mean steps?"),
        ("zzzzz: 3", "it has all, json, model, out, rate, responses, steps, store"),
        ("config: x", "has no option 'config'"),
        ("3: x", "has no option '3'"),
        ("steps: [1, 2]", "steps takes one value, not a list"),
        ("responses: [a, [b]]", "responses must be a single value or a list of them"),
        ("out: {a: b}", "out must be a single value"),
        ("steps: 1.5", "'--steps'"),
        ("steps: 0", "'--steps'"),
        ("steps: many", "'--steps'"),
        ("store: perhaps", "'--store'"),
        ("- steps", "must be a table"),
        ("", "must be a table"),
        ("a: [", "cannot be read as YAML"),
        ("[" * 100_000, "cannot be read as YAML"),
        ("model: !!python/object/apply:os.system ['true']", "cannot be read as YAML"),
    ],
)
def test_what_cannot_be_is_refused(run: Any, text: str, message: str) -> None:
    status, page = run(text, "--responses", "r", "m")
    assert status == 2
    assert message in page


def test_what_is_required_stays_so(run: Any) -> None:
    status, page = run("steps: 3", "m")
    assert status == 2
    assert "--responses" in page


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    command = get_command(app)
    for one in command.commands.values():  # type: ignore[attr-defined]
        add_config_option(one)
    with pytest.raises(SystemExit) as stopped:
        command.main(["work", "--config", "/no/such/file.yaml", "m"], "hf-spec")
    assert stopped.value.code == 2
    assert "/no/such/file.yaml" in capsys.readouterr().err
