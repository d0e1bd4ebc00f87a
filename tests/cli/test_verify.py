"""`hf-spec verify`: report, output file and exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from hf_spec.engine.decode import drafter
from tests.biased_rules import OneTooMany, RedrawnBonus

SHORT = ["--max-new-tokens", "8", "--draws", "200"]


@pytest.fixture
def command(folder: Path, prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "160")

    def run(*arguments: str) -> Any:
        given = ["verify", str(folder), "--prompts", str(prompt_file), *SHORT, *arguments]
        return CliRunner().invoke(build_app(), given)

    return run


def test_real_code_passes(command: Any, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "verify.json"
    tree = "tree:max_draft_tokens=2"
    both = ["--strategy", "draft", "--strategy", tree, "--assistant", str(folder)]
    result = command(*both, "--sampled-prompts", "1", "--out", str(out))
    assert result.exit_code == 0, result.output
    assert "draft" in result.output
    assert result.output.count("2 of 2 outputs identical, 16 tokens") == 2
    assert result.output.count("passed") == 2
    assert "of the probability in every text is detected" in result.output
    report = json.loads(out.read_text())
    assert report["passed"] is True
    assert report["dtype"] == "float32"
    assert [one["strategy"] for one in report["strategies"]] == ["draft", tree]
    assert report["strategies"][1]["sampling"]["texts"][0]["accepted"] > 0
    assert not list(tmp_path.glob("*.part"))


def test_the_models_own_layers_draft(command: Any) -> None:
    named = ["--strategy", "draft:length_policy=static", "--assistant", "truncated:1"]
    result = command(*named, "--sampled-prompts", "0")
    assert "2 of 2 outputs identical, 16 tokens" in result.output, result.output


def test_a_wrong_token_fails(command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "NodeDraw", OneTooMany)
    out = tmp_path / "verify.json"
    monkeypatch.setenv("COLUMNS", "80")
    result = command("--strategy", "lookup", "--sampled-prompts", "0", "--out", str(out))
    assert result.exit_code == 1
    assert "differences from plain generate()" in result.output
    assert max(map(len, result.stdout.splitlines())) <= 80
    heads = {"prompt", "position", "plain", "output", "margin", "error", "reason"}
    assert heads <= set(result.stdout.split())
    assert "FAILED" in result.output
    assert json.loads(out.read_text())["passed"] is False


def test_a_wrong_distribution_fails(
    command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "NodeDraw", RedrawnBonus)
    result = command("--strategy", "tree", "--assistant", str(folder))
    assert result.exit_code == 1
    assert "2 of 2 outputs identical" in result.output
    assert "FAILED" in result.output


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--strategy", "tre"], 2, "unknown spec_strategy 'tre'"),
        (["--strategy", "tree"], 2, "needs --assistant"),
        (["--strategy", "lookup", "--dtype", "int8"], 2, "'int8' is not one of"),
        (["--strategy", "lookup", "--out", "/no/such/folder/report.json"], 2, "there is no folder"),
        (["--strategy", "lookup", "--draws", "3"], 2, "--draws"),
        ([], 2, "--strategy"),
    ],
)
def test_what_cannot_be_is_said(
    command: Any, arguments: list[str], status: int, message: str
) -> None:
    result = command(*arguments)
    assert result.exit_code == status
    assert message in result.output


class TestNothingAccepted:
    def test_it_is_not_passed(self, command: Any, tmp_path: Path) -> None:
        out = tmp_path / "verify.json"
        result = command("--strategy", "none", "--sampled-prompts", "1", "--out", str(out))
        assert result.exit_code == 3, result.output
        assert "passed" not in result.output
        assert "NOT PROVEN: no draft was accepted (greedy and sampling)" in result.output
        report = json.loads(out.read_text())
        assert (report["passed"], report["verdict"]) == (False, "unproven")

    def test_the_worst_verdict_counts(self, command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        both = ["--strategy", "none", "--strategy", "lookup", "--sampled-prompts", "0"]
        assert command(*both).exit_code == 3
        monkeypatch.setattr(drafter, "NodeDraw", OneTooMany)
        assert command(*both).exit_code == 1


def test_a_file_is_read_whole_unless_limited(folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join("abcde"))
    given = ["verify", str(folder), "--prompts", str(prompts), "--strategy", "none", *SHORT]
    for limit, expected in ([], 5), (["--per-task", "3"], 3):
        result = CliRunner().invoke(build_app(), [*given, "--sampled-prompts", "0", *limit])
        assert f"{expected} of {expected} outputs identical" in result.output
