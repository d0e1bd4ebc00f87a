"""`hf-spec card`: a card with the adapter's own facts, and with what a benchmark found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.adapters.samples import save_sample


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["card", *map(str, arguments)])


def test_a_card(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    result = run(folder)
    assert result.exit_code == 0, result.output
    assert result.stdout == f"{folder / 'README.md'}\n"
    card = ModelCard.load(folder / "README.md")
    assert card.data.library_name == "hf_spec"
    assert 'spec_strategy="falcon"' in card.text


def test_what_is_told_and_what_is_there(tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    (folder / "README.md").write_text("mine")
    result = run(folder)
    assert result.exit_code == 2
    assert (folder / "README.md").read_text() == "mine"
    told = ("--base-model", "me/base", "--license", "mit", "--dataset", "a/b", "--dataset", "c/d")
    result = run(folder, *told, "--overwrite")
    assert result.exit_code == 0, result.output
    data = ModelCard.load(folder / "README.md").data
    assert (data.base_model, data.license, data.datasets) == ("me/base", "mit", ["a/b", "c/d"])


def test_no_adapter(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert list(tmp_path.iterdir()) == []


def test_no_folder_and_no_results(tmp_path: Path) -> None:
    assert run(tmp_path / "nothing").exit_code == 2
    assert run(tmp_path, "--results", tmp_path / "nothing.json").exit_code == 2
