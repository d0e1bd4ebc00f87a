"""`python -m hf_spec.bench` on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_spec.bench.__main__ import main


def test_the_table_is_printed_and_every_record_written(
    folder: Path, prompt_file: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / "result.json"
    arguments = ["--model", str(folder), "--prompts", str(prompt_file), "--out", str(out)]
    main([*arguments, "--new-tokens", "6", "--repeats", "2"])
    printed = capsys.readouterr().out
    written = json.loads(out.read_text())
    names = list(dict.fromkeys(record["contender"] for record in written["records"]))
    assert names[0] == "plain"
    assert {"transformers lookup", "hf_spec lookup, one match", "hf_spec lookup"} <= set(names)
    assert len(written["records"]) == len(names) * 2 * 2
    assert all(record["identical"] for record in written["records"])
    assert all(f"| {name} | " in printed for name in names)
    assert written["command"].startswith(f"python -m hf_spec.bench --model {folder}")
    assert {row["task"] for row in written["summary"]} == {"all", "count", "letters"}
    assert written["environment"]["threads"] >= 1


def test_the_model_must_be_named(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main([])
    assert "--model" in capsys.readouterr().err
