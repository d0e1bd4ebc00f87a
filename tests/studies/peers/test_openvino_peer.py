"""The lines of a peer, and OpenVINO itself where it is installed."""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from examples.studies.peers import openvino_peer
from examples.studies.peers.openvino_peer import serve
from examples.studies.peers.peer import started
from hf_spec.evaluation.bench.contenders import plain

# It goes with an older transformers than ours, so it has an environment of its own.
PYTHON = os.environ.get("OPENVINO_PYTHON")


def test_lines() -> None:
    requests = [{"ids": [1, 2], "new_tokens": 2}, {"ids": [3], "new_tokens": 1}]
    written = io.StringIO()
    serve(
        {"version": 1},
        lambda ids, new_tokens: [ids[-1]] * new_tokens,
        io.StringIO("".join(json.dumps(one) + "\n" for one in requests)),
        written,
    )
    facts, *answers = map(json.loads, written.getvalue().splitlines())
    assert facts == {"version": 1}
    assert [answer["ids"] for answer in answers] == [[1, 2, 2, 2], [3, 3]]
    assert all(answer["processor_seconds"] >= 0 for answer in answers)


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
    with started("openvino", f"{PYTHON} {openvino_peer.__file__} {exported} {options}") as peer:
        assert peer.facts["INFERENCE_PRECISION_HINT"] == "f32"
        got = peer.run(ids, 6).sequence.tolist()
        assert peer.processor_seconds > 0
    assert got == plain(model).run(ids, 6).sequence.tolist()
