"""The run record: every start of a training with its command, options, settings and machine."""

from __future__ import annotations

import json
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.training.run_record import RUN, record_start, with_options
from tests.training.test_trainer import SETTINGS, Line

CPU = torch.device("cpu")


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / RUN).read_text())["starts"]


def test_what_a_start_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["hf-spec", "train", "falcon", "--out", "my head"])
    with with_options({"out": Path("my head"), "labels": "hard", "rank": 2}):
        record_start(tmp_path, {"seed": 4}, 0, CPU)
    [start] = starts(tmp_path)
    assert start["command"] == "hf-spec train falcon --out 'my head'"
    assert start["options"] == {"out": "my head", "labels": "hard", "rank": 2}
    assert start["settings"] == {"seed": 4}
    assert start["step"] == 0
    assert start["environment"]["torch"] == torch.__version__
    assert start["packages"]["peft"]
    assert datetime.fromisoformat(start["time"]).tzinfo is not None


def test_outside_a_command_there_are_no_options(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), with_options({"rank": 2}):
        raise RuntimeError
    record_start(tmp_path, {}, 0, CPU)
    assert starts(tmp_path)[0]["options"] is None


def test_a_resumed_training_adds_its_start(tmp_path: Path) -> None:
    broken = Line()
    broken.stop_at = 5
    with pytest.raises(KeyboardInterrupt):
        broken.fit(tmp_path)
    [first] = starts(tmp_path)
    Line().fit(tmp_path)
    again = starts(tmp_path)
    assert again[0] == first
    assert [start["step"] for start in again] == [0, SETTINGS.save_every]
    assert first["settings"]["seed"] == SETTINGS.seed
    # A finished one that is started again does nothing, and says nothing.
    Line().fit(tmp_path)
    assert starts(tmp_path) == again
