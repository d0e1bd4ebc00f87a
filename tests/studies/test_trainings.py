"""Records of finished trainings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies import trainings


def trained(folder: Path, *ends: float) -> Path:
    """Write the files of a training with an evaluation after every step; return its folder."""
    (folder / "training").mkdir(parents=True)
    start = {"settings": {"epochs": 1}, "environment": {}, "packages": {}, "command": "private"}
    (folder / "training" / "run.json").write_text(json.dumps({"starts": [{}, start]}))
    common = {"loss": 1.0, "seconds": 30.0, "tokens": 8, "rate": 0.1}
    steps = [{"step": n + 1, **common, "tau": tau} for n, tau in enumerate(ends)]
    lines = [{"step": 0, **common}, *steps]
    (folder / "training" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def test_a_record_has_what_was_asked_how_long_it_took_and_how_it_went(tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    trainings.main(
        [str(trained(tmp_path / "head-0", 0.2, 0.4)), "--before", "100", "--out", str(out)]
    )
    [(name, one)] = json.loads(out.read_text())["trainings"].items()
    assert (name, one["settings"]) == ("head-0", {"epochs": 1})
    assert (one["steps"], one["minutes"]) == (3, 1.5)
    expected = [(1, 116, 0.2), (2, 124, 0.4)]
    names = "step", "answer_tokens", "tau"
    assert one["evaluations"] == [dict(zip(names, end, strict=True)) for end in expected]
    assert "private" not in out.read_text()


def test_seeds_of_one_kind_are_put_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [trained(tmp_path / f"k2-off-{seed}", 0.1, seed / 10) for seed in (1, 3)]
    folders.append(trained(tmp_path / "lora", 0.7))
    trainings.main([*map(str, folders), "--out", str(tmp_path / "record.json")])
    said = capsys.readouterr().out
    assert said == "k2-off: 0.200 (0.100 - 0.300)\nlora: 0.700 (0.700 - 0.700)\n"
