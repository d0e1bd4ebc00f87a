"""Every load is measured with every strategy, with equal outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.serving.load_curve import main


@pytest.mark.full
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "curve.json"
    size = ["--new-tokens", "3", "--repeats", "2", "--prompt-tokens", "150"]
    command = ["--model", str(folder), "--strategy", "lookup", "--out", str(out), *size]
    # The second command resumes the record of the first.
    main([*command, "--load", "1"])
    first = json.loads(out.read_text())["records"]
    main([*command, "--load", "1", "--load", "3"])
    record = json.loads(out.read_text())
    assert record["records"][: len(first)] == first
    assert 0 < record["prompts"] < 60
    assert record["prompt_tokens"] == 150
    records = record["records"]
    measured = [(record["load"], record["strategy"]) for record in records]
    assert sorted(measured) == [
        (load, s) for load in (1, 3) for s in ("lookup",) * 2 + ("none",) * 2
    ]
    assert all(record["equal"] and record["seconds"] > 0 for record in records)
    printed = capsys.readouterr().out
    assert "| streams | `none`, tokens/s | `lookup` over `none` |" in printed
    assert "0 of 8 runs" in printed
