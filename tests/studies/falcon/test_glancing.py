"""Every cell of the glancing study is trained once, seed by seed, and recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.falcon import glancing
from tests.studies.test_trainings import trained


def test_all_cells_are_trained_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[list[str]] = []

    def train(words: list[str]) -> None:
        parts.append(words)
        out = Path(words[words.index("--out") + 1])
        trained(out, 0.1, len(parts) / 10)
        (out / glancing.ADAPTER).write_text("{}")

    monkeypatch.setattr(glancing, "run_part", train)
    command = ["--model", "m", "--responses", "a.jsonl", "--work", str(tmp_path / "work")]
    command += ["--out", str(tmp_path / "record.json"), "--seeds", "2"]
    glancing.main([*command, "--", "--batch-tokens", "64"])
    assert len(parts) == len(set(map(tuple, parts))) == 12
    cells = {(p[p.index("--num-layers") + 1], p[p.index("--csgd") + 1]) for p in parts[:6]}
    assert cells == {("1", "off"), ("1", "steps"), ("2", "off"), ("2", "steps")}
    assert [p[p.index("--seed") + 1] for p in parts] == ["0"] * 6 + ["1"] * 6
    assert sum("--no-learn-replaced" in part for part in parts) == 4
    assert all(part[-2:] == ["--batch-tokens", "64"] for part in parts)
    said = capsys.readouterr().out
    assert "| 2 | 1 | off | 2 | 0.400 | 0.100 - 0.700 | 1.5 |" in said
    # Finished trainings are not repeated, but are written to the new record.
    (tmp_path / "record.json").unlink()
    glancing.main(command)
    assert len(parts) == 12
    assert len(json.loads((tmp_path / "record.json").read_text())["trainings"]) == 12


def test_no_training_starts_after_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(glancing, "run_part", lambda words: pytest.fail("started"))
    command = ["--model", "m", "--responses", "a.jsonl", "--work", str(tmp_path)]
    glancing.main([*command, "--out", str(tmp_path / "record.json"), "--seconds", "-1"])
