"""Step time study: only equal results are timed, and all settings are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.studies.kernels.step_time import check, main, table


def test_other_results_are_not_timed() -> None:
    expected = torch.tensor([[1.0, -8.0]])
    check(expected, expected + 5e-4)
    with pytest.raises(AssertionError, match="logits differ by 0"):
        check(expected, expected + 2e-3)


def test_table() -> None:
    seconds = {"eager": {"median": 0.02}, "captured": {"median": 0.008}}
    assert table([{"rows": 4, "nodes": 8, "seconds": seconds}]).splitlines() == [
        "| rows | nodes | eager, ms | captured, ms | ratio |",
        "|---|---|---|---|---|",
        "| 4 | 8 | 20.00 | 8.00 | 2.50 |",
    ]


def run(folder: Path, out: Path, *more: str) -> Any:
    sizes = ["--rows", "1", "3", "--nodes", "2", "5", "--context", "9", "--repeats", "2"]
    main(["--model", str(folder), "--out", str(out), *sizes, *more])
    return json.loads(out.read_text())


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    written = run(folder, tmp_path / "time.json", "--device", "cpu", "--dtype", "float32")
    assert "| 3 | 5 |" in capsys.readouterr().out
    assert [(s["rows"], s["nodes"]) for s in written["steps"]] == [(1, 2), (1, 5), (3, 2), (3, 5)]
    for step in written["steps"]:
        assert step["seconds"].keys() == {"eager", "padded"}
        assert all(spread["median"] > 0 for spread in step["seconds"].values())
    assert written["environment"].keys() >= {"device", "torch", "triton"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what it says without a GPU")
def test_without_a_gpu_it_says_so(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--model", "any"])
    assert "there is no GPU here" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu(folder: Path, tmp_path: Path) -> None:
    """Captured steps are faster for a small model, whose eager steps wait for kernel launches."""
    for step in run(folder, tmp_path / "time.json", "--repeats", "20")["steps"]:
        assert step["seconds"]["captured"]["median"] < step["seconds"]["eager"]["median"]
