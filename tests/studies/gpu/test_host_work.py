"""Host time of a round: exclusive times of the parts, and complete records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.gpu.host_work import DEVICE, PARTS, HostTimes, main, measure

FOLDER = Path("examples/studies/gpu")


@pytest.mark.parametrize("name", ["host_work_before.json", "host_work_after.json"])
def test_the_record_has_every_part(name: str) -> None:
    recorded = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    for parts in recorded["cases"].values():
        assert parts.keys() == PARTS.keys() - set(DEVICE)


def test_times_of_inner_parts_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 1.0, 4.0, 10.0])
    monkeypatch.setattr("examples.studies.gpu.host_work.time.perf_counter", lambda: next(now))
    times = HostTimes()
    times.rounds.append({"outer": 0.0, "inner": 0.0})
    with times.part("outer"), times.part("inner"):
        pass
    assert times.rounds == [{"outer": 7e6, "inner": 3e6}]


@pytest.mark.full
def test_rounds_are_replayed() -> None:
    parts = measure(1, streams=True)
    assert parts.keys() == PARTS.keys() - set(DEVICE)
    assert all(parts[name] > 0 for name in ("streaming", "static inputs", "layout"))


@pytest.mark.full
def test_the_command_writes_a_record(tmp_path: Path) -> None:
    main(["--out", str(tmp_path / "host_work.json")])
    assert json.loads((tmp_path / "host_work.json").read_text(encoding="utf-8"))["cases"]
