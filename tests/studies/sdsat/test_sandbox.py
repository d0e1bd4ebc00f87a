"""Sandboxed programs: which pass, which fail, and what they cannot do."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from examples.studies.sdsat.sandbox import Limits, run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux's")


def test_a_program_that_reaches_its_end_passes() -> None:
    assert run_program("x = 1 + 1\nassert x == 2\nprint('said')").passed


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("assert 1 == 2", "error"),
        ("def broken(:", "error"),
        ("raise SystemExit(0)\nassert False", "ended early"),
        ("import os\nos._exit(0)", "ended early"),
        ("x = 'a' * (1 << 31)", "error"),
        ("open('large', 'wb').write(b'a' * (1 << 22))", "error"),
    ],
)
def test_what_fails(program: str, reason: str) -> None:
    outcome = run_program(program)
    assert (outcome.passed, outcome.reason) == (False, reason)


@pytest.mark.full
@pytest.mark.parametrize("program", ["while True: pass", "import time\ntime.sleep(60)"])
def test_time_is_limited(program: str) -> None:
    start = time.perf_counter()
    outcome = run_program(program, Limits(seconds=1))
    assert (outcome.passed, outcome.reason) == (False, "time")
    assert time.perf_counter() - start < 10


def test_nothing_happens_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No modules, environment variables, or folders are shared."""
    monkeypatch.setenv("SECRET", "kept")
    monkeypatch.chdir(tmp_path)
    program = "import os, sys\nopen('left', 'w').write('x')\nassert 'SECRET' not in os.environ\n"
    assert run_program(program + "assert 'torch' not in sys.modules").passed
    assert list(tmp_path.iterdir()) == []
    assert os.environ["SECRET"] == "kept"


def test_where_there_is_no_network_nothing_can_be_reached() -> None:
    program = "import socket\nsocket.create_connection(('127.0.0.1', 9), timeout=1)"
    outcome = run_program(program)
    assert not outcome.passed
    if not run_program("pass").network:
        # Not even the loopback interface is up.
        reached = "import socket, errno\ntry:\n    " + program.split("\n")[1]
        reached += "\nexcept OSError as error:\n    assert error.errno == errno.ENETUNREACH"
        assert run_program(reached).passed
