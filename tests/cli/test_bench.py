"""`hf-spec bench`: tables, output file, and rejected options."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from hf_spec.cli.bench import show
from hf_spec.evaluation.bench.report import SPEEDS
from hf_spec.evaluation.bench.suite import Benchmark

SHORT = ["--max-new-tokens", "6", "--repeats", "2", "--no-baselines"]


@pytest.fixture
def command(folder: Path, prompt_file: Path) -> Any:
    def run(*arguments: str) -> Any:
        given = ["bench", str(folder), "--prompts", str(prompt_file), *SHORT, *arguments]
        return CliRunner().invoke(build_app(), given)

    return run


def test_tables_are_printed_and_every_record_written(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "results.json"
    tree = "tree:max_draft_tokens=2"
    strategies = ["--strategy", "lookup", "--strategy", tree, "--assistant", "truncated:2"]
    result = command(*strategies, "--batch-size", "1", "--batch-size", "2", "--out", str(out))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    found = [record["contender"] for record in written["records"][:4]]
    assert found == ["plain", "none", "lookup", tree]
    assert len(written["records"]) == 4 * 2 * (2 + 1)
    assert all(record["identical"] for record in written["records"])
    assert written["command"].startswith("hf-spec ")
    assert {row["task"] for row in written["summary"]} == {"all", "count", "letters", "mixed"}
    lines = result.stdout.splitlines()
    assert "batch size 1" in lines
    assert "batch size 2" in lines
    assert "|" not in result.stdout, "not raw Markdown"
    [speeds, _, plain, *_] = lines[lines.index("batch size 1") + 2 :]
    # All rows of a column have the same width.
    assert len(speeds) == len(plain)
    assert speeds.endswith("  identical")
    assert plain.startswith("plain  ")
    assert plain.endswith("  2 of 2")
    assert any(line.startswith(f"{tree}  ") for line in lines)
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_the_tables_are_drawn(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "batch_size": 1,
        "contender": "transformers assistant",
        "task": "all",
        "identical_by_task": None,
    }
    figures = ("ratio", "tokens_per_second")
    spreads = {f"{name}{end}": 1.0 for name in figures for end in ("_p20", "", "_p80")}
    others = {"total_ratio": 1.0, "tokens_per_forward": 1.0, "peak_bytes": None}
    report = {"summary": [{**row, **spreads, **others, "identical": 2, "outputs": 2}]}
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    show(report)
    drawn = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
    assert "─ batch size 1" in drawn
    for figure in ("1.00 (1.00 - 1.00)", "1.0 (1.0 - 1.0)"):
        assert figure in drawn, "figures are not broken"
    assert "|" not in drawn
    assert max(map(len, drawn.splitlines())) <= columns
    words = drawn.split()
    assert all(word in words for heading in SPEEDS for word in heading.split())


def test_lookup_is_measured_by_default_and_tasks_can_be_chosen(
    command: Any, tmp_path: Path
) -> None:
    out = tmp_path / "results.json"
    result = command("--task", "count", "--out", str(out), "--profile")
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert {record["contender"] for record in written["records"]} == {"plain", "none", "lookup"}
    assert {record["task"] for record in written["records"]} == {"count"}
    assert "share of the time, %  " in result.stdout
    result = command("--task", "count", "--profile", "--markdown")
    assert "### batch size 1" in result.stdout
    assert "| share of the time, % |" in result.stdout


@pytest.mark.full
def test_synthetic_acceptance_is_said_everywhere(command: Any, tmp_path: Path) -> None:
    out, plots = tmp_path / "results.json", tmp_path / "plots"
    options = ["--synthetic-acceptance", "0.7", "--synthetic-length", "3"]
    result = command(*options, "--out", str(out), "--plots", str(plots))
    assert result.exit_code == 0, result.output
    written = json.loads(out.read_text())
    assert written["synthetic_acceptance"] == 0.7
    names = {record["contender"] for record in written["records"]}
    assert names == {"plain", "none", "synthetic, 3 tokens, acceptance 0.7"}
    assert "SYNTHETIC acceptance 0.7: drafts of synthetic" in result.stdout
    assert {p.stem for p in plots.iterdir()} == {
        "speed_by_task",
        "acceptance_by_position",
        "verify_cost",
    }


def test_an_interrupted_run_leaves_what_it_has(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = Benchmark.run

    def interrupted(self: Benchmark, *arguments: Any) -> Any:
        for count, results in enumerate(measured(self, *arguments)):
            if count == 1:
                raise KeyboardInterrupt
            yield results

    monkeypatch.setattr(Benchmark, "run", interrupted)
    out = tmp_path / "results.json"
    assert command("--out", str(out)).exit_code == 130
    written = json.loads(out.read_text())
    assert {record["prompt"] for record in written["records"]} == {"0"}
    assert {row["task"] for row in written["summary"]} == {"all", "count"}
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategy", "lokup"], "unknown spec_strategy 'lokup'"),
        (["--strategy", "lookup:length=3"], "has no option length"),
        (["--strategy", "tree"], "needs --assistant"),
        (["--strategy", "draft@truncated:9"], "num_layers=9"),
        (["--task", "math"], "no prompts of task 'math'; it has count, letters"),
        (["--batch-size", "3"], "a batch of 3 rows needs 3 prompts, but there are 2"),
        (["--device", "cuda"], "--device cuda"),
        (["--temperature", "0.5"], "--temperature 0.5 needs --do-sample"),
        (["--out", "/no/such/folder/results.json"], "there is no folder"),
        (["--do-sample", "--synthetic-acceptance", "0.5"], "choose greedy decoding"),
    ],
)
def test_what_cannot_be_is_said_before_anything_runs(
    command: Any, arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(Benchmark, "run", lambda *_: pytest.fail("it ran"))
    result = command(*arguments)
    assert result.exit_code == 2
    assert message in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    "arguments",
    [["--prompts", "none.jsonl"], ["--synthetic-acceptance", "1.5"], ["--batch-size", "0"]],
)
def test_wrong_usage(command: Any, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output


def test_files_that_would_be_lost_are_refused(
    command: Any, prompt_file: Path, tmp_path: Path
) -> None:
    before = prompt_file.read_text()
    result = command("--out", str(prompt_file))
    assert result.exit_code == 2
    assert "is the input file; choose another" in result.stderr
    assert prompt_file.read_text() == before
    (tmp_path / "plots").write_text("")
    pytest.importorskip("matplotlib")
    result = command("--plots", str(tmp_path / "plots"))
    assert result.exit_code == 2
    assert "is a file; use a new or existing folder" in result.stderr


def test_a_file_is_read_whole_unless_limited(folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "results.json"
    prompts.write_text("\n".join("abcdef"))
    given = ["bench", str(folder), "--prompts", str(prompts), *SHORT, "--repeats", "1"]
    counts = []
    for limit in ([], ["--per-task", "3"]):
        result = CliRunner().invoke(build_app(), [*given, *limit, "--out", str(out)])
        assert result.exit_code == 0, result.output
        counts.append(len({one["prompt"] for one in json.loads(out.read_text())["records"]}))
    assert counts == [6, 3]
