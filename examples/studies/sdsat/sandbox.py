"""Sandbox for model-written programs: a child process with limited time, memory and disk space.

This process does not execute any of the code. The child gets the program on standard input, an
empty folder and an empty environment. Before it reads a line, it limits its CPU time, memory, file
size and number of processes (root is exempt from the last). Where Linux permits, it also enters a
network namespace without a network. This contains faulty programs, but keeps a hostile one only
from the network: do not run it on a machine with files that must stay secret.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

# Code of the child. The flags are CLONE_NEWUSER | CLONE_NEWNET; a kernel may reject them.
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
    """Limits of a program: time in seconds, memory in bytes."""

    seconds: int = 5
    memory: int = 1 << 29


@dataclass(frozen=True)
class Outcome:
    """Outcome of a program.

    Attributes:
        passed: True if it reached its end.
        reason: why it failed: "error", "time", or "ended early" if it exited by itself.
        network: True if a network was available; False if it was stopped before reporting it.
    """

    passed: bool
    reason: str = ""
    network: bool = False


def run_program(program: str, limits: Limits | None = None) -> Outcome:
    """Run a Python program to its end, tests included."""
    limits = limits or Limits()
    # A program that calls exit() skips the tests after it, so it must not count as passed.
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
            # Kill its whole process group, including any processes that it started.
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
