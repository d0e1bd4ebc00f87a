"""`hf-spec check-head`: prints every layout with its share, and the layout that fits."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.published_heads import sample
from tests.tiny_models import build, tokenizer


def test_layouts_are_printed(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("bababebe\ncoco")
    arguments = ["check-head", str(tmp_path / "model"), sample("eagle").folder]
    arguments += ["--prompts", str(prompts), "--max-new-tokens", "8", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    first, *_, last = done.stdout.splitlines()
    assert first.endswith("its config")
    assert "% of " in first
    assert "embedding='scaled'" in done.stdout
    assert last.startswith("fits: ")


def test_a_model_is_no_head(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    folder = str(tmp_path / "model")
    arguments = ["check-head", folder, folder, "--max-new-tokens", "1", "--device", "cpu"]
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 2
    assert "not a published head" in done.output.replace("\n", " ")


def test_a_wrong_head_is_said_before_the_model_answers(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    # The folder has no tokenizer, so generation would fail.
    done = CliRunner().invoke(build_app(), ["check-head", str(tmp_path / "model"), "/no/head"])
    assert done.exit_code == 2
    assert "there is no folder /no/head" in done.output
