"""The contenders of DISCO's comparison: all there, all exact, from the command line too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.adapters.folder import load_adapter
from hf_spec.bench.draft_lengths import length_contenders, main
from tests.tiny_models import save_disco_adapter, settled_prompt

CALIBRATED = {"calibration": {"best_static": "static 3"}}


def test_every_baseline_says_the_same(model: Any, tmp_path: Path) -> None:
    save_disco_adapter(tmp_path, model, **CALIBRATED)
    contenders = length_contenders(model, load_adapter(tmp_path))
    assert [c.name for c in contenders] == [
        "plain",
        "engine without drafts",
        "heuristic",
        "confidence",
        "static 5",
        "static 3, the best on validation",
        "disco",
        "oracle",
    ]
    ids = settled_prompt("llama")
    runs = {c.name: c.run(ids, 20) for c in contenders}
    for name, run in runs.items():
        assert torch.equal(run.sequence, runs["plain"].sequence), name
    forwards = {name: run.target_forwards or 0 for name, run in runs.items()}
    assert forwards["oracle"] <= min(forwards.values())
    assert forwards["engine without drafts"] == 20


def test_without_a_calibration_there_is_no_best_static_length(model: Any, tmp_path: Path) -> None:
    save_disco_adapter(tmp_path, model)
    names = [c.name for c in length_contenders(model, load_adapter(tmp_path))]
    assert not any("best" in name for name in names)


def test_command_line(
    folder: Path, model: Any, prompt_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_disco_adapter(tmp_path / "adapter", model, **CALIBRATED)
    out = tmp_path / "records.json"
    arguments = ["--model", folder, "--adapter", tmp_path / "adapter", "--prompts", prompt_file]
    arguments += ["--new-tokens", 6, "--repeats", 1, "--out", out]
    main([str(argument) for argument in arguments])
    assert "| oracle |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert len(written["records"]) == 8 * 2
    assert all(row["identical"] for row in written["records"])
    assert written["calibration"] == CALIBRATED["calibration"]
