"""`hf-spec export`: a folder and the command to use it with, or why not."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.published_heads import sample
from tests.tiny_models import build


def test_a_folder_and_the_next_command(tmp_path: Path) -> None:
    build("llama").config.save_pretrained(tmp_path / "target")
    out = tmp_path / "out"
    arguments = ["export", sample().folder, str(out), "--base-model", str(tmp_path / "target")]
    done = CliRunner().invoke(build_app(), [*arguments, "--for", "sglang"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("next: python -m sglang.launch_server --model-path ")
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    again = CliRunner().invoke(build_app(), [*arguments, "--for", "sglang"])
    assert again.exit_code == 2
    assert "exists already" in " ".join(again.output.split())


def test_engines_are_named(tmp_path: Path) -> None:
    arguments = ["export", sample().folder, str(tmp_path / "out")]
    for more in ([], ["--for", "tgi"]):
        refused = CliRunner().invoke(build_app(), [*arguments, *more])
        assert refused.exit_code == 2
        assert "--for" in refused.output
