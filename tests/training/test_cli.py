"""The commands: from a file of answers to a calibrated adapter, and errors in one sentence."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hf_spec import cli
from hf_spec.adapters.folder import load_adapter
from hf_spec.training.responses import FORMAT, Response
from tests.tiny_models import VOCAB, build, tokenizer


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    copy.deepcopy(build("llama")).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    lines = [json.dumps({"format": FORMAT})]
    for index in range(8):
        prompt = torch.randint(3, VOCAB, (1, 6), generator=generator)
        text = build("llama").generate(prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        task = "code" if index % 2 else "chat"
        lines.append(json.dumps(asdict(Response(f"p{index}", task, text[:6], text[6:]))))
    path = tmp_path / "responses.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{index}", "task": "chat", "turns": ["be"]} for index in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli.build_app(), [str(argument) for argument in arguments])


def test_train_and_calibrate(
    model_folder: Path, responses: Path, prompts: Path, tmp_path: Path
) -> None:
    adapter = tmp_path / "adapter"
    train = ("train", "disco", "--model", model_folder, "--responses", responses, "--out", adapter)
    result = run(*train, "--draft-layers", 2, "--labels", "soft", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "static 5" in result.output
    options = load_adapter(adapter, "disco").options
    assert options["training"]["labels"] == "soft"
    assert options["training"]["seed"] == 3
    assert options["training"]["tasks"] == ["chat", "code"]
    calibrate = ("calibrate", "disco", "--model", model_folder, "--adapter", adapter)
    few = ("--threshold", 0.4, "--longest", 3, "--new-tokens", 4, "--repeats", 1)
    result = run(*calibrate, "--prompts", prompts, *few)
    assert result.exit_code == 0, result.output
    options = load_adapter(adapter, "disco").options
    assert (options["threshold"], options["max_draft_tokens"]) == (0.4, 3)
    assert options["calibration"]["prompts"] == options["validation_prompts"]
    result = run(*calibrate, "--prompts", prompts, *few, "--all", "--max-prompts", 2)
    assert result.exit_code == 0, result.output
    assert load_adapter(adapter).options["calibration"]["prompts"] == ["p0", "p1"]


def test_one_task(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    out = ("--responses", responses, "--out", tmp_path / "a")
    result = run(
        "train", "disco", "--model", model_folder, *out, "--draft-layers", 1, "--task", "code"
    )
    assert result.exit_code == 0, result.output
    assert load_adapter(tmp_path / "a").options["training"]["tasks"] == ["code"]


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
    for group in ("train", "calibrate"):
        assert "disco" in run(group, "--help").output
        text = " ".join(run(group, "disco", "--help").output.split())
        assert "--model" in text
    assert "spec_strategy" in " ".join(run("train", "disco", "--help").output.split())


def test_from_prompts_to_a_trained_draft(model_folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{n}", "task": "qa", "turns": ["ba" * (n + 1)]} for n in range(40)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answers, out = tmp_path / "answers.jsonl", tmp_path / "draft"
    runner, app = CliRunner(), cli.build_app()
    common = ["--model", str(model_folder), "--dtype", "float32"]
    arguments = ["--prompts", str(prompts), "--out", str(answers), "--max-new-tokens", "6"]
    result = runner.invoke(app, ["train", "responses", *common, *arguments])
    assert result.exit_code == 0, result.output
    assert "0 prompts were too long" in result.output
    assert len(answers.read_text().splitlines()) == 41
    arguments = ["--responses", str(answers), "--out", str(out), "--layers", "1", "--rank", "2"]
    result = runner.invoke(app, ["train", "draft", *common, *arguments, "--epochs", "1"])
    assert result.exit_code == 0, result.output
    assert "agreement" in result.output
    assert load_adapter(out, "draft").options["num_layers"] == 1
    assert (tmp_path / "answers.teacher").is_dir()
