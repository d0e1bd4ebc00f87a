"""When the demo says that the machine was busy."""

from __future__ import annotations

import time

import pytest

from hf_spec.bench.runner import Record
from hf_spec.cli.demo import machine


def plain(prompt: str, seconds: float, contender: str = "plain") -> Record:
    return Record(prompt, prompt, contender, 0, seconds, seconds, 10, 10, True)


def watched(monkeypatch: pytest.MonkeyPatch, busy: float, own: float) -> float:
    """The share that a watch tells after a second of four processors."""
    monkeypatch.setattr(machine, "_processor_seconds", lambda: (100.0, 50.0, 10.0))
    watch = machine.CpuWatch()
    monkeypatch.setattr(machine, "_processor_seconds", lambda: (104.0, 50.0 + busy, 10.0 + own))
    return watch.share_of_others()


@pytest.mark.parametrize(
    ("busy", "own", "share"), [(2.0, 2.0, 0.0), (3.0, 2.0, 0.25), (4.0, 0.0, 1.0), (1.9, 2.0, 0.0)]
)
def test_own_work_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float
) -> None:
    assert watched(monkeypatch, busy, own) == pytest.approx(share)


def test_the_counters_of_this_machine_are_read() -> None:
    everything, busy, own = machine._processor_seconds()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    later, busier, own_later = machine._processor_seconds()
    assert own_later - own >= 0.2
    assert later - everything >= busier - busy > 0


def test_disagreement_is_that_of_the_worst_prompt() -> None:
    records = [plain("a", 2.0), plain("a", 3.0), plain("b", 9.0), plain("b", 9.0)]
    records += [plain("a", 99.0, "lookup")]
    assert machine.slowest_to_fastest(records, "plain") == 1.5
    assert machine.slowest_to_fastest(records[:1], "plain") == 1.0


def test_warnings_name_the_figure() -> None:
    assert machine.warnings(0.05, 1.1) == []
    [busy] = machine.warnings(0.42, 1.1)
    assert "42%" in busy
    [unsteady] = machine.warnings(0.0, 1.5)
    assert "1.50" in unsteady
    assert len(machine.warnings(0.42, 1.5)) == 2
