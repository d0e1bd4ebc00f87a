"""Continuous batching gives the outputs of static batches, in no more forward passes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.ems_sd.continuous import continuous, main, measure, static, summary, table
from tests.tiny_models import build


def test_answers_and_counts() -> None:
    model = build("llama")
    texts = [torch.tensor(ids) for ids in ([3, 5, 7], [4, 5], [9, 3, 3, 8], [2, 6], [7])]
    call = {"max_new_tokens": 12, "do_sample": False, "spec_strategy": "lookup"}
    apart, together = (way(model, texts, 2, **call) for way in (static, continuous))
    plain = [model.generate(text[None], max_new_tokens=12, do_sample=False)[0] for text in texts]
    expected = [answer[len(text) :].tolist() for answer, text in zip(plain, texts, strict=True)]
    assert apart["answers"] == together["answers"] == expected
    assert together["target_forwards"] <= apart["target_forwards"]


def test_records_and_summary() -> None:
    model = build("llama")
    texts = [torch.tensor([3, 5, 7]), torch.tensor([4, 5]), torch.tensor([9])]
    ticks = iter(range(1000))
    records = measure(model, texts, [2], ["none", "lookup"], 6, 2, lambda: float(next(ticks)))
    assert len(records) == 8
    assert {record["seconds"] for record in records} == {1.0}
    rows = summary(records)
    assert [(row["slots"], row["strategy"]) for row in rows] == [(2, "none"), (2, "lookup")]
    assert all(row["identical"] and row["speed"] == 1 for row in rows)
    assert " | 1.00 (1.00 - 1.00) | yes |" in table(rows)


@pytest.mark.full
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "continuous.json"
    command = ["--model", str(folder), "--per-task", "1", "--slots", "2", "--new-tokens", "4"]
    main([*command, "--repeats", "1", "--out", str(out)])
    assert capsys.readouterr().out.startswith("| slots | strategy |")
    written = json.loads(out.read_text())
    assert written["prompts"] == 6
    assert len(written["records"]) == 4
