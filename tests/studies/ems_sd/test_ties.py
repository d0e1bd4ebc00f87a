"""Ties of batches: equal rows have no differences, and a wrong token is not a tie."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch

from examples.studies.ems_sd import ties
from examples.studies.ems_sd.batches import LOOKUP
from examples.studies.ems_sd.ties import examine, summary
from tests.tiny_models import build

TEXTS = [torch.arange(5, 5 + length) for length in (4, 9, 6)]
BATCHES = [[0, 1], [1, 2, 0]]


def test_rows_of_float32_batches_have_no_differences() -> None:
    records = list(examine(build("llama"), TEXTS, BATCHES, LOOKUP, 8))
    assert [record["prompts"] for record in records] == BATCHES
    assert summary(records) == {"rows": 5, "equal": 5}


def test_a_wrong_token_is_no_tie() -> None:
    model: Any = copy.deepcopy(build("llama"))
    right = model.generate

    def wrong(*args: Any, spec_strategy: Any = None, **options: Any) -> Any:
        output = right(*args, **options)
        if spec_strategy is not None:
            output[1, -3] = (output[1, -3] + 1) % 50 + 3
        return output

    model.generate = wrong
    (record,) = examine(model, TEXTS, BATCHES[:1], LOOKUP, 8)
    assert record["differences"][0] == []
    (found,) = record["differences"][1]
    assert (found["position"], found["kind"]) == (5, "bug")
    assert summary([record]) == {"rows": 2, "equal": 1, "bug": 1}


def test_the_command_line_writes_a_record(tmp_path: Path, folder: Path) -> None:
    out = tmp_path / "ties.json"
    sizes = ["--batch-sizes", "2", "--batches", "1", "--new-tokens", "4"]
    ties.main(["--model", str(folder), "--dtype", "float32", *sizes, "--out", str(out)])
    record = json.loads(out.read_text())
    assert record["summary"] == {"rows": 2, "equal": 2}
    assert "examples.studies.ems_sd.ties" in record["command"]
