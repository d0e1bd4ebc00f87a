"""The lines of a peer, and OpenVINO itself where it is installed."""

from __future__ import annotations

import io
import json
from argparse import Namespace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from examples.studies.peers.openvino_peer import load, serve


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
@pytest.mark.parametrize("lookup", [False, True])
def test_openvino_says_what_plain_generate_says(folder: Path, tmp_path: Path, lookup: bool) -> None:
    pytest.importorskip("openvino_genai", reason="needs the package openvino-genai")
    exporters = pytest.importorskip(
        "optimum.exporters.openvino", reason="needs the package optimum-intel"
    )
    exporters.main_export(str(folder), tmp_path / "exported", task="text-generation-with-past")
    settings = {"threads": 1, "lookup": lookup, "draft_tokens": 5, "match_length": 3}
    facts, answer = load(Namespace(folder=tmp_path / "exported", **settings))
    assert facts["INFERENCE_PRECISION_HINT"] == "f32"
    ids = [4, 5, 6, 4, 5, 6, 4]
    model = AutoModelForCausalLM.from_pretrained(folder)
    expected = model.generate(model.dummy_inputs["input_ids"].new_tensor([ids]), max_new_tokens=6)
    assert ids + answer(ids, 6) == expected[0].tolist()
