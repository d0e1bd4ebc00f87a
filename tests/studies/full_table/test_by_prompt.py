"""The table and the file of strategies against plain, prompt by prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from examples.studies.full_table.by_prompt import Timed, main, table


def timed(prompt: str, contender: str, *seconds: float) -> Timed:
    ours = contender != "plain"
    numbers = (0.5, 3.0, 0.1, 0.2) if ours else (None, None, None, None)
    return Timed(prompt, contender, list(seconds), *numbers, {}, True)


def test_table() -> None:
    records = [
        *(timed("a", "plain", 2.0, 4.0), timed("a", "auto", 9.0, 1.0)),
        *(timed("b", "plain", 1.0, 1.0), timed("b", "auto", 2.0, 3.0)),
        *(timed("c", "plain", 3.0, 3.0), timed("c", "auto", 3.0, 3.0)),
    ]
    assert table(records).splitlines()[2:] == [
        "| auto | 0.50 (b) | 0.50 | 1.00 | 2.00 | 0.50 | 3.0 | 3/3 |"
    ]


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "by_prompt.json"
    given = ["--strategy", "none", "--strategy", "auto", "--assistant", "truncated:1"]
    size = ["--per-task", "1", "--new-tokens", "4", "--repeats", "2"]
    main(["--model", str(folder), *given, *size, "--processor-time", "--out", str(out)])
    assert "| auto |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {record["contender"] for record in written["records"]} == {"plain", "none", "auto"}
    assert all(record["identical"] for record in written["records"])
    assert all(len(record["seconds"]) == 2 for record in written["records"])
