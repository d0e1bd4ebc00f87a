"""The commands: from a file of answers to a calibrated adapter, and errors in one sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_spec.adapters.folder import load_adapter
from hf_spec.cli.app import build_app
from tests.cli.train.cli_files import next_step, run, save_model, save_responses


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return save_responses(tmp_path / "responses.jsonl")


def test_one_task(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    out = ("--responses", responses, "--out", tmp_path / "a")
    result = run(
        "train", "disco", "--model", model_folder, *out, "--draft-layers", 1, "--task", "code"
    )
    assert result.exit_code == 0, result.output
    assert load_adapter(tmp_path / "a").options["training"]["tasks"] == ["code"]
    [start] = json.loads((tmp_path / "a" / "training" / "run.json").read_text())["starts"]
    assert (start["options"]["draft_layers"], start["options"]["labels"]) == (1, "hard")
    assert start["settings"]["seed"] == 0


@pytest.mark.parametrize("drafts", [(), ("--draft", "x", "--draft-layers", "2")])
def test_one_draft_model(drafts: tuple[str, ...], responses: Path, tmp_path: Path) -> None:
    out = ("--responses", responses, "--out", tmp_path / "a")
    result = run("train", "disco", "--model", "unused", *out, *drafts)
    assert result.exit_code == 2
    assert "--draft-layers" in result.output


def test_errors_come_in_one_sentence(model_folder: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text("{}\n")
    result = run(
        *("train", "disco", "--model", model_folder, "--responses", wrong),
        *("--out", tmp_path / "a", "--draft-layers", 1),
    )
    assert result.exit_code == 2
    assert "no file of responses" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = run("train", "--help").output
    for name in ("responses", "draft", "disco", "falcon", "sdsat"):
        assert name in text
    assert "--model" in run("train", "disco", "--help").output
    assert "spec_strategy" in " ".join(run("train", "disco", "--help").output.split())


def test_from_prompts_to_a_trained_draft(model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "task": "qa", "turns": ["ba" * (n + 1)]} for n in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, out = tmp_path / "answers.jsonl", tmp_path / "draft"
    runner, app = CliRunner(), build_app()
    common = ["--model", str(model_folder), "--dtype", "float32"]
    arguments = ["--prompts", str(prompts), "--out", str(answers), "--max-new-tokens", "6"]
    result = runner.invoke(app, ["train", "responses", *common, *arguments])
    assert result.exit_code == 0, result.output
    assert "0 prompts were too long" in result.output
    assert len(answers.read_text().splitlines()) == 41
    words = next_step(result)
    assert words[:4] == ["train", "falcon", "--model", str(model_folder)]
    assert words[4:6] == ["--responses", str(answers)]
    assert run(*words, "--epochs", 1, "--vocabulary", 0).exit_code == 0
    assert load_adapter(tmp_path / "answers-head", "falcon")
    arguments = ["--responses", str(answers), "--out", str(out), "--layers", "1", "--rank", "2"]
    result = runner.invoke(app, ["train", "draft", *common, *arguments, "--epochs", "1"])
    assert result.exit_code == 0, result.output
    assert "agreement" in result.output
    assert next_step(result)[:4] == ["bench", str(model_folder), "--strategy", f"tree@{out}"]
    assert load_adapter(out, "draft").options["num_layers"] == 1
    assert (tmp_path / "answers.teacher").is_dir()
