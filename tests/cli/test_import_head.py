"""`hf-spec import-head`: where it was written, or why not."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.published_heads import plain_config


def test_a_pickle_and_no_pickle(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(plain_config()))
    arguments = ["import-head", str(source), str(tmp_path / "out")]
    refused = CliRunner().invoke(build_app(), arguments)
    assert refused.exit_code == 2
    assert "no pickle file" in refused.output.replace("\n", " ")
    torch.save({"x": torch.ones(1)}, source / "pytorch_model.bin")
    done = CliRunner().invoke(build_app(), arguments)
    assert done.exit_code == 0, done.output
    assert done.stdout == f"{tmp_path / 'out'}\n"
    assert (tmp_path / "out" / "model.safetensors").is_file()
