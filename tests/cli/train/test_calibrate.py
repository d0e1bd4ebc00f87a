"""`hf-spec calibrate`: options are stored in the adapter; errors are one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_spec.adapters.folder import load_adapter, save_adapter
from hf_spec.common.prompts import load_prompts
from tests.cli.train.cli_files import next_step, run, save_model, save_responses
from tests.methods.falcon.test_drafter import knowing_head


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return save_responses(tmp_path / "responses.jsonl")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    rows = [{"id": f"p{index}", "task": "chat", "turns": ["be"]} for index in range(8)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


@pytest.mark.full
def test_disco(model_folder: Path, responses: Path, prompts: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    train = ("train", "disco", model_folder, "--responses", responses, "--out", adapter)
    result = run(*train, "--draft-layers", 2, "--labels", "soft", "--seed", 3)
    assert result.exit_code == 0, result.output
    assert "static 5" in result.output
    options = load_adapter(adapter, "disco").options
    assert options["training"]["labels"] == "soft"
    assert options["training"]["seed"] == 3
    assert options["training"]["tasks"] == ["chat", "code"]
    calibrate = ("calibrate", "disco", model_folder, "--adapter", adapter)
    few = ("--threshold", 0.4, "--max-draft-tokens", 3, "--max-new-tokens", 4, "--repeats", 1)
    result = run(*calibrate, "--prompts", prompts, *few)
    assert result.exit_code == 0, result.output
    assert next_step(result) == ["bench", str(model_folder), "--strategy", f"disco@{adapter}"]
    options = load_adapter(adapter, "disco").options
    assert (options["threshold"], options["max_draft_tokens"]) == (0.4, 3)
    assert options["calibration"]["prompts"] == options["validation_prompts"]
    result = run(*calibrate, "--prompts", prompts, *few, "--all", "--max-prompts", 2)
    assert result.exit_code == 0, result.output
    assert load_adapter(adapter).options["calibration"]["prompts"] == ["p0", "p1"]


class TestFalcon:
    FEW = ("--depth", 4, "--num-ranks", 97, "--max-nodes", 5, "--max-new-tokens", 6, "--repeats", 1)

    def test_the_tree_goes_into_the_adapter(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        adapter = tmp_path / "adapter"
        save_adapter(adapter, knowing_head(2).to_adapter({}))
        command = ("calibrate", "falcon", model_folder, "--adapter", adapter)
        sizes = ("--drafted-nodes", 9, "--generations", 2)
        result = run(*command, "--responses", responses, *self.FEW, *sizes, "--max-answers", 5)
        assert result.exit_code == 0, result.output
        assert next_step(result) == ["bench", str(model_folder), "--strategy", f"falcon@{adapter}"]
        options = load_adapter(adapter, "falcon").options
        calibration = options["calibration"]
        # A response of twelve tokens has eight drafts of four tokens.
        assert (calibration["rounds"], calibration["depth"]) == (40, 4)
        assert (calibration["num_ranks"], calibration["max_nodes"]) == (97, 5)
        assert (calibration["new_tokens"], calibration["repeats"]) == (6, 1)
        assert (calibration["drafted_nodes"], calibration["generations"]) == ([9], 2)
        assert 1 <= options["max_nodes"] <= 5
        assert options["max_nodes"] <= len(options["tree"]) <= 9
        text = " ".join(result.output.split())
        best = calibration["choices"][calibration["best"]]
        assert f" {best['tau']:g} {best['tokens_per_second']:g} <" in text
        for row in ("verify 1 nodes", "verify 5 nodes", "draft 2 passes"):
            assert row in text

    def test_errors_come_in_one_sentence(
        self, model_folder: Path, responses: Path, tmp_path: Path
    ) -> None:
        adapter = tmp_path / "adapter"
        save_adapter(adapter, knowing_head(2).to_adapter({}))
        command = ("calibrate", "falcon", model_folder, "--adapter", adapter)
        result = run(*command, "--responses", responses, "--depth", 12)
        assert result.exit_code == 2
        assert "no answer is longer than 12 tokens" in " ".join(result.output.split())
        theirs = load_prompts()[0].id
        responses.write_text(responses.read_text().replace('"p3"', json.dumps(theirs)))
        result = run(*command, "--responses", responses, *self.FEW)
        assert result.exit_code == 2
        assert "belongs to a benchmark prompt" in " ".join(result.output.replace("│", " ").split())
        assert "Traceback" not in result.output


def test_help_teaches() -> None:
    for name in ("disco", "falcon"):
        assert name in run("calibrate", "--help").output
        assert "MODEL" in run("calibrate", name, "--help").output
    text = " ".join(run("calibrate", "falcon", "--help").output.split())
    assert 'spec_strategy="falcon"' in text
    for option in ("--responses", "--depth", "--max-nodes", "--repeats"):
        assert option in text
