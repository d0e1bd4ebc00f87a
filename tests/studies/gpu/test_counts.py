"""Counts of a round on the simulated GPU agree with the record."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from examples.studies.gpu.counts import CASES, main, measure

RECORD = Path("examples/studies/gpu/counts_after.json")


def test_the_record_has_every_case() -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["cases"]
    assert recorded.keys() == CASES.keys()
    for counts in recorded.values():
        assert counts["captures"] == 0
        assert counts["waits"] <= 2


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_counts_are_those_of_the_record(name: str) -> None:
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))["cases"][name]
    found = asdict(measure(name))
    for key in ("launches", "waits", "sends", "captures"):
        assert found[key] <= recorded[key], key


@pytest.mark.full
def test_the_command_writes_a_record(tmp_path: Path) -> None:
    main(["--case", "lookup", "--out", str(tmp_path / "counts.json")])
    written = json.loads((tmp_path / "counts.json").read_text(encoding="utf-8"))
    assert written["cases"].keys() == {"lookup"}
    assert written["environment"]["torch"]
