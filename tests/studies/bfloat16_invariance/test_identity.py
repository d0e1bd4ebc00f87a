"""Comparison of bfloat16 outputs with those of `none`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.bfloat16_invariance import identity
from hf_spec.common.prompts import Prompt


def test_it_counts_identical_outputs(
    model: Any,
    prompts: list[Prompt],
    tokenizer: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    out = tmp_path / "record.json"
    given = ["--model", str(tmp_path / "model"), "--new-tokens", "4", "--per-task", "1"]
    given += ["--strategy", "lookup", "--layers", "uncompiled", "--out", str(out)]
    monkeypatch.setattr(identity, "load_prompts", lambda per_task: prompts)
    assert identity.main(given) == 0
    record = json.loads(out.read_text())
    assert record["identical"] == {"lookup, uncompiled": f"{len(prompts)} of {len(prompts)}"}
    assert [row["prompt"] for row in record["rows"]["uncompiled"]] == [one.id for one in prompts]
    assert record["dtype"] == "bfloat16"
