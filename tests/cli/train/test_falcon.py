"""`hf-spec train falcon`: options reach the head, and the next command works."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.adapters.folder import load_adapter
from tests.cli.train.cli_files import next_step, run, save_model, save_responses, short_bench


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "model")


@pytest.fixture
def responses(tmp_path: Path) -> Path:
    return save_responses(tmp_path / "responses.jsonl")


SMALL = ("--epochs", 2, "--batch-tokens", 60, "--vocabulary", 0)


def test_two_files_with_features_beside_them(
    model_folder: Path, responses: Path, tmp_path: Path
) -> None:
    other = responses.with_name("others.jsonl")
    other.write_text(responses.read_text())
    out = tmp_path / "adapter"
    train = ("train", "falcon", "--model", model_folder, "--out", out, "--dtype", "float32")
    files = ("--responses", responses, "--responses", other)
    options = ("--block-size", 3, "--csgd", "released", "--soft-weight", 0.5, "--seed", 4)
    result = run(*train, *files, *options, *SMALL)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "the features of 8 texts take" in text
    assert "slot_3_given" in text
    for file in (responses, other):
        assert list(file.with_suffix(".features").glob("*.safetensors"))
    found = load_adapter(out, "falcon").options
    assert found["shape"]["block_size"] == 3
    training = found["training"]
    assert (training["texts"], training["seed"]) == (16, 4)
    assert (training["csgd"]["schedule"], training["csgd"]["soft_weight"]) == ("released", 0.5)
    # A head to go on from, and no features on disk.
    again = ("--init", out, "--no-store", "--block-size", 3)
    train = ("train", "falcon", "--model", model_folder, "--out", tmp_path / "again")
    result = run(*train, "--responses", responses, *again, *SMALL)
    assert result.exit_code == 0, result.output
    assert load_adapter(tmp_path / "again").options["training"]["start"] == out.name


def test_wrong_choices_and_heads(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    train = ("train", "falcon", "--model", model_folder, "--responses", responses)
    result = run(*train, "--out", tmp_path / "a", "--noise", "gauss")
    assert result.exit_code == 2
    assert "choose paper or released or off" in " ".join(result.output.split())
    result = run(*train, "--out", tmp_path / "a", "--init", tmp_path / "none")
    assert result.exit_code == 2
    assert "there is no folder" in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_teaches() -> None:
    text = " ".join(run("train", "falcon", "--help").output.split())
    assert 'spec_strategy="falcon"' in text
    for option in ("--block-size", "--csgd", "--init", "--no-store", "--responses"):
        assert option in text


def test_the_next_command_works(model_folder: Path, responses: Path, tmp_path: Path) -> None:
    out = tmp_path / "my head"
    train = ("train", "falcon", "--model", model_folder, "--responses", responses, "--out", out)
    words = next_step(run(*train, *SMALL, "--dtype", "bfloat16"))
    assert words[:4] == ["bench", str(model_folder), "--strategy", f"falcon@{out}"]
    assert words[4:] == ["--dtype", "bfloat16"]
    result = run(*words, *short_bench(tmp_path))
    assert result.exit_code == 0, result.output
    assert "falcon@my head  " in result.stdout
