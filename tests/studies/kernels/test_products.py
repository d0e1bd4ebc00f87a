"""Matmuls by row count: only equal results are timed, and all settings are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.kernels.products import check, main
from tests.compiler import needs_compiler


def test_other_results_are_not_timed() -> None:
    expected = torch.tensor([3.0, 4.0])
    check(torch.float32, {"one": expected, "other": expected + 1e-6})
    with pytest.raises(AssertionError, match=r"products in torch\.float32 differ by 2"):
        check(torch.float32, {"one": expected, "other": -expected})


@needs_compiler
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "products.json"
    main(["--model", str(folder), "--out", str(out), "--rows", "1", "5", "--repeats", "2"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| dtype | rows | 1 | 5 |"
    forms = ["F.linear", "oneDNN", "our kernel"]
    rounded = "our kernel, weights in bfloat16"
    assert [line.split(" | ")[1] for line in lines[2:]] == [*forms, rounded, *forms]
    written = json.loads(out.read_text())
    assert written["seconds"].keys() == {"torch.float32", "torch.bfloat16"}
    for by_rows, number in zip(written["seconds"].values(), (4, 3), strict=True):
        assert [len(runs) for mine in by_rows.values() for runs in mine.values()] == [
            2
        ] * 2 * number
