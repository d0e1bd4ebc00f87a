"""Memory floor study: steps and reads alternate, and shared weights count once."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.kernels import memory_floor
from tests.cli.train.cli_files import save_model
from tests.tiny_models import build


def test_bytes() -> None:
    model = copy.deepcopy(build("llama"))
    head = model.get_output_embeddings().weight
    model.get_input_embeddings().weight = head
    layers = sum(p.nbytes for p in model.model.layers.parameters() if p.ndim == 2)
    assert memory_floor.step_bytes(model) == layers + head.nbytes


@pytest.mark.full
def test_command(tmp_path: Path, capsys: Any) -> None:
    save_model(tmp_path / "model")
    out = tmp_path / "floor.json"
    memory_floor.main(["--model", str(tmp_path / "model"), "--repeats", "2", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    names = [line.split(" | ")[0].strip("| ") for line in lines[2:]]
    assert names == ["step", "read", "step / read"]
    record = json.loads(out.read_text())
    assert {name: len(runs) for name, runs in record["seconds"].items()} == {"step": 2, "read": 2}
    assert record["bytes"] > 0
