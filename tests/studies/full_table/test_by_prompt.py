"""Strategies compared with plain `generate()` by prompt: the table and the record."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.full_table.by_prompt import Timed, main, table


def timed(prompt: str, contender: str, *seconds: float, new_tokens: int = 1) -> Timed:
    ours = contender != "plain"
    numbers = (0.5, 3.0, 0.1, 0.2) if ours else (None, None, None, None)
    elapsed = [7 * new_tokens] * len(seconds)
    return Timed(prompt, contender, list(seconds), elapsed, new_tokens, *numbers, {}, [])


def test_table() -> None:
    records = [
        *(timed("a", "plain", 2.0, 4.0), timed("a", "auto", 9.0, 1.0)),
        *(timed("b", "plain", 1.0, 1.0), timed("b", "auto", 2.0, 3.0)),
        # Twice the tokens in twice the time, as after a tie.
        *(timed("c", "plain", 3.0, 3.0), timed("c", "auto", 6.0, 6.0, new_tokens=2)),
    ]
    assert table(records).splitlines()[2:] == [
        "| auto | 0.50 (b) | 0.50 | 1.00 | 2.00 | 0.50 | 3.0 | 3/3 |"
    ]
    assert "1.00 (a) | 1.00 | 1.00 | 1.00" in table(records, "elapsed")


def command(folder: Path, out: Path) -> list[str]:
    given = ["--strategy", "none", "--strategy", "auto", "--assistant", "truncated:1"]
    size = ["--per-task", "1", "--new-tokens", "4", "--repeats", "2"]
    return ["--model", str(folder), *given, *size, "--processor-time", "--out", str(out)]


def test_command(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "by_prompt.json"
    main(command(folder, out))
    assert "| auto |" in capsys.readouterr().out
    written = json.loads(out.read_text())
    assert {record["contender"] for record in written["records"]} == {"plain", "none", "auto"}
    assert written["strategies"] == ["none", "auto"]
    assert not any(record["differences"] for record in written["records"])
    assert all(len(record["seconds"]) == 2 for record in written["records"])


@pytest.mark.full
def test_a_command_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "by_prompt.json"
    main([*command(folder, out), "--minutes", "0"])
    assert not out.exists()
    main(command(folder, out))
    whole = json.loads(out.read_text())
    kept = whole["records"][:9]
    out.write_text(json.dumps({**whole, "records": kept}))
    main(command(folder, out))
    again = json.loads(out.read_text())["records"]
    assert again[:9] == kept
    assert [r["prompt"] for r in again] == [r["prompt"] for r in whole["records"]]
    with pytest.raises(SystemExit, match="repeats"):
        main([*command(folder, out), "--repeats", "3"])


def test_without_plain(folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "record.json"
    rows = [
        {"id": f"{task} {i}", "task": task, "turns": [f"Say {i}."]} for task in "ab" for i in "12"
    ]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    given = ["--strategy", "none", "--strategy", "lookup", "--new-tokens", "3", "--repeats", "1"]
    given += ["--no-plain", "--prompts", str(prompts), "--task", "b", "--out", str(out)]
    main(["--model", str(folder), *given])
    written = json.loads(out.read_text())
    found = [(record["prompt"], record["contender"]) for record in written["records"]]
    assert found == [(f"b {i}", name) for i in "12" for name in ("none", "lookup")]
    assert written["strategies"] == ["none", "lookup"]
