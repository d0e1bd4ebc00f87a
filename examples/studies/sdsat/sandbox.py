"""Runs a program that a model wrote, in a process of its own with little time, memory and room.

Nothing of it is executed here. The child is given the program on its standard input, an empty
folder and an empty environment, and limits itself before it reads a line: seconds of processor
time, memory, size of files, no processes but itself (root is not held to that), and, where Linux
lets it, a network namespace without any network. That keeps clumsy programs away from the machine,
and a hostile one from the network alone: run this where nothing is that may not be read.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

# Read by the child. CLONE_NEWUSER | CLONE_NEWNET; a kernel may refuse them.
LAUNCHER = """
import ctypes, resource, sys
seconds, size = int(sys.argv[1]), int(sys.argv[2])
for kind, most in (
    (resource.RLIMIT_CPU, seconds),
    (resource.RLIMIT_AS, size),
    (resource.RLIMIT_FSIZE, 1 << 20),
    (resource.RLIMIT_CORE, 0),
    (resource.RLIMIT_NOFILE, 32),
    (resource.RLIMIT_NPROC, 0),
):
    resource.setrlimit(kind, (most, most))
alone = ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0
print("network off" if alone else "network on", flush=True)
program = sys.stdin.read()
exec(compile(program, "program", "exec"), {"__name__": "__main__"})
"""
OUTPUT_BYTES = 1 << 16


@dataclass(frozen=True)
class Limits:
    """What a program may use: seconds of time, bytes of memory."""

    seconds: int = 5
    memory: int = 1 << 29


@dataclass(frozen=True)
class Outcome:
    """How a program ended.

    Attributes:
        passed: whether it reached its end.
        reason: why not: "error", "time", or "ended early" for one that stopped itself.
        network: whether it could have reached one; False where it was stopped before it said so.
    """

    passed: bool
    reason: str = ""
    network: bool = False


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run a Python program to its end, tests included."""
    limits = limits or Limits()
    # A program that calls exit() has not passed the tests after it.
    mark = secrets.token_hex(16)
    source = f"{program}\nprint({mark!r}, flush=True)\n"
    bounds = [str(limits.seconds), str(limits.memory)]
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile() as output:
        child = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", LAUNCHER, *bounds],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env={},
            start_new_session=True,
        )
        try:
            child.communicate(source.encode(), timeout=limits.seconds + 1)
        except subprocess.TimeoutExpired:
            # It leads a group of its own, with all that it may have started.
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return Outcome(False, "time")
        size = output.seek(0, os.SEEK_END)
        output.seek(max(0, size - OUTPUT_BYTES))
        said = output.read().decode(errors="replace").splitlines()
    network = not said or said[0] != "network off"
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, "time", network)
    if child.returncode:
        return Outcome(False, "error", network)
    passed = bool(said) and said[-1] == mark
    return Outcome(passed, "" if passed else "ended early", network)
