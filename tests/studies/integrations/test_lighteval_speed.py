"""lighteval study: every strategy gives the responses of plain decoding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("lighteval", reason="needs the package lighteval in an environment of its own")

import torch

from examples.studies.integrations.lighteval_speed import STRATEGIES, main
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build

pytestmark = pytest.mark.integration


def test_command(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path / "model")
    make_tokenizer(None).save_pretrained(tmp_path / "model")
    out = tmp_path / "record.json"
    size = ["--items", "2", "--new-tokens", "6", "--batch-sizes", "2", "--out", str(out)]
    try:
        main(["--model", str(tmp_path / "model"), *size])
    finally:
        # lighteval disables gradients.
        torch.set_grad_enabled(True)
    runs = json.loads(out.read_text())["runs"]
    assert [run["strategy"] for run in runs] == ["plain", *STRATEGIES[1:]]
    assert all(run["same"] == 2 for run in runs)
