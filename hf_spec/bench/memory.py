"""Peak memory of a stretch of work: what the allocator held on a GPU, the process on a CPU.

A process keeps memory that others left behind, so on a CPU figures of one run of a benchmark hold
all its models and whatever each contender keeps; only differences between runs say what one needs.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

# Linux: writing 5 here forgets the peak of this process; the status file tells the one since.
_FORGET = Path("/proc/self/clear_refs")
_STATUS = Path("/proc/self/status")


def forget_peak(device: torch.device) -> None:
    """Begin a stretch of work on `device`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif _FORGET.exists():
        _FORGET.write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """Most bytes held since `forget_peak`; None where it cannot be told.

    On CUDA those that tensors took, elsewhere what the process had in memory (Linux only).
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type != "cpu" or not _FORGET.exists():
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text())
    return None if found is None else int(found[1]) * 1024
