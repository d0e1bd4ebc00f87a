"""Wall-clock time and peak memory.

On a GPU, memory is what the allocator held; on a CPU, the resident memory of the process. A process
keeps freed memory, so a CPU figure includes all models of the benchmark and everything that other
contenders cache. Only differences between runs show what one contender needs.
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
    """Return the result of `call` and its seconds; waits for a GPU before and after."""
    synchronize()
    start = clock()
    result = call()
    synchronize()
    return result, clock() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one, so that its work is included in a timing."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak(device: torch.device) -> None:
    """Reset the peak of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _RESET.exists():
        _RESET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Return the peak memory in bytes since `reset_peak`, None where it is not available."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or not _RESET.exists():
        return None
    peak = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return None if peak is None else int(peak[1]) * 1024
