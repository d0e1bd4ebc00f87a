"""Warnings about CPU load: other programs and the load average."""

from __future__ import annotations

import time

import psutil
import pytest

from hf_spec.cli.demo.watch import CpuWatch, load_warning


@pytest.mark.parametrize(
    ("busy", "own", "share"),
    # `busy`: percent of all four processors; `own`: percent of one.
    [(50.0, 200.0, 0.0), (75.0, 200.0, 0.25), (100.0, 0.0, 1.0), (47.5, 200.0, 0.0)],
)
def test_own_work_is_not_counted(
    monkeypatch: pytest.MonkeyPatch, busy: float, own: float, share: float
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "cpu_percent", lambda: busy)
    monkeypatch.setattr(psutil.Process, "cpu_percent", lambda process: own)
    assert CpuWatch().share_of_others() == pytest.approx(share)


def test_the_counters_of_this_machine_are_read() -> None:
    watch = CpuWatch()
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    own, busy = watch._own.cpu_percent(), psutil.cpu_percent()
    assert own > 20
    assert busy > 0.5 * own / psutil.cpu_count()


def test_other_programs_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CpuWatch, "share_of_others", lambda watch: 0.05)
    assert CpuWatch().warning() == ""
    monkeypatch.setattr(CpuWatch, "share_of_others", lambda watch: 0.42)
    assert "42%" in CpuWatch().warning()


def test_a_high_load_average_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda: 4)
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.0, 9.0, 9.0))
    assert load_warning() == ""
    monkeypatch.setattr(psutil, "getloadavg", lambda: (2.1, 0.0, 0.0))
    assert "load average of 2.1 on 4 processors" in load_warning()
    assert "unreliable" in load_warning()
