"""Seconds and peak memory of a stretch of work.

Memory is what the allocator held on a GPU, and what the process held on a CPU. A process keeps
memory that others left, so on a CPU figures of one run of a benchmark hold all its models and
whatever each contender keeps; only differences between runs say what one needs.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

Result = TypeVar("Result")

# Linux: writing 5 here resets the peak of this process; the status file has the peak since then.
_RESET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def timed(
    call: Callable[[], Result], clock: Callable[[], float] = time.perf_counter
) -> tuple[Result, float]:
    """What `call` returns and its seconds, from an idle GPU to an idle GPU if there is one."""
    synchronize()
    start = clock()
    result = call()
    synchronize()
    return result, clock() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that a clock sees its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    """Begin a stretch of work on `device`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes held since `reset_peak`; None where it is not known."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or not _RESET.exists():
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return None if found is None else int(found[1]) * 1024
