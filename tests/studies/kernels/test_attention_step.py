"""Attention step study: both implementations alternate, and all results are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.studies.kernels.attention_step import main, table
from tests.compiler import needs_compiler


def test_table() -> None:
    seconds = {
        "PyTorch": [0.03, 0.02],
        "our kernel": [0.01, 0.016],
        "the kernel alone": [0.001, 0.0005],
    }
    record = {"rows": 4, "nodes": 1, "context": 200, "seconds": seconds}
    assert table([record]).splitlines() == [
        "| rows | nodes | context | PyTorch | our kernel | the kernel alone | ratio | share |",
        "|---|---|---|---|---|---|---|---|",
        "| 4 | 1 | 200 | 20.0 / 25.0 | 10.0 / 13.0 | 0.5 / 0.8 | 2.00 | 5.0% |",
    ]


@needs_compiler
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "steps.json"
    shapes = ["--shape", "1", "3", "9", "--shape", "2", "1", "7"]
    main(["--model", str(folder), "--out", str(out), *shapes, "--repeats", "2"])
    assert "| 2 | 1 | 7 |" in capsys.readouterr().out
    steps = json.loads(out.read_text())["steps"]
    assert [(step["rows"], step["nodes"], step["context"]) for step in steps] == [
        (1, 3, 9),
        (2, 1, 7),
    ]
    assert [len(runs) for step in steps for runs in step["seconds"].values()] == [2] * 6
