"""OpenVINO, if installed: its outputs equal those of plain `generate()`."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples.studies.peers import openvino_peer
from examples.studies.peers.peer import started
from hf_spec.evaluation.bench.contenders import plain

# OpenVINO needs an older transformers, so it has its own environment.
PYTHON = os.environ.get("OPENVINO_PYTHON")


@pytest.mark.integration
@pytest.mark.skipif(PYTHON is None, reason="OPENVINO_PYTHON names no interpreter with OpenVINO")
@pytest.mark.parametrize("options", ["", "--lookup"])
def test_openvino_says_what_plain_generate_says(
    folder: Path, model: PreTrainedModel, tmp_path: Path, options: str
) -> None:
    exported = tmp_path / "exported"
    export = [
        "export",
        "openvino",
        "--task",
        "text-generation-with-past",
        "--weight-format",
        "fp32",
    ]
    command = Path(str(PYTHON)).with_name("optimum-cli")
    subprocess.run([command, *export, "-m", folder, exported], check=True)
    ids = torch.tensor([[4, 5, 6, 4, 5, 6, 4]])
    with started("openvino", f"{PYTHON} -m {openvino_peer.__name__} {exported} {options}") as peer:
        assert peer.facts["INFERENCE_PRECISION_HINT"] == "f32"
        got = peer.run(ids, 6).sequence.tolist()
        assert peer.processor_seconds > 0
    assert got == plain(model).run(ids, 6).sequence.tolist()
