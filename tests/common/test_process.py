"""Whether this process is the command."""

from __future__ import annotations

import sys

import pytest

from hf_spec.common.process import started_as_command


@pytest.mark.parametrize(
    ("program", "expected"),
    [
        ("/usr/bin/hf-spec", True),
        ("hf-spec.exe", True),
        ("hf-spec.py", False),
        ("my-hf-spec", False),
        ("-c", False),
        ("-m", False),
        ("", False),
    ],
)
def test_started_as_command(program: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "pytest", "hf_spec"])
    assert started_as_command() is expected
    monkeypatch.setattr(sys, "argv", [])
    assert not started_as_command()


def test_a_process_that_is_another_module_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["-m"])
    for module, expected in (("hf_spec", True), ("hf_spec.evaluation.bench.report", False)):
        monkeypatch.setattr(sys, "orig_argv", ["python", "-u", "-m", module])
        assert started_as_command() is expected
