"""Peak memory of every contender, measured in a separate process each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.peers.peak_memory import main


@pytest.mark.full
def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "peaks.json"
    main(["--model", str(folder), "--strategy", "none", "--new-tokens", "4", "--out", str(out)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == [
        "| strategy",
        "|---|---|",
        "| plain",
        "| none",
    ]
    peaks = json.loads(out.read_text())["peak_bytes"]
    assert peaks.keys() == {"plain", "none"}
    assert all(peak > 1 << 27 for peak in peaks.values())
