"""Hardware, versions and commit for the records of measurements and trainings."""

from __future__ import annotations

import importlib.metadata
import platform
import re
import subprocess
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

# CPU flags of bfloat16 instructions on Linux, x86 and ARM.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return hardware, versions and commit; by default of the accelerator, if any."""
    device = device or accelerator() or torch.device("cpu")
    facts = {
        "device": _name_of(device),
        "cpu": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # Installed distributions of this package and of the baseline.
    for name in ("hf_spec", "economize"):
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[name] = importlib.metadata.version(name)
    return {**facts, **_commit()}


def accelerator() -> torch.device | None:
    """Return the device of CUDA, ROCm, XPU or MPS, without an index; None on a CPU."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return _processor()
    module = torch.get_device_module(device)
    # MPS has one device, a part of the processor.
    named = hasattr(module, "get_device_name")
    return str(module.get_device_name(device)) if named else f"{_processor()} ({device.type})"


def _processor() -> str:
    file = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return model[1] if model else platform.processor() or platform.machine()


@cache
def has_bfloat16() -> bool:
    """Return True if the processor has bfloat16 instructions, or if its flags are unavailable."""
    file = Path("/proc/cpuinfo")
    flags = re.search(r"(?:flags|Features)\s*: (.+)", file.read_text()) if file.exists() else None
    return flags is None or not BFLOAT16.isdisjoint(flags[1].split())


@cache
def _commit() -> dict[str, Any]:
    """Return the commit of the checkout and if files were changed; empty without one."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        # The environment may be inside the checkout of another project.
        if not git("ls-files", here.name):
            return {}
        changed = bool(git("status", "--short", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "commit_changed": changed}
    except OSError:
        return {}
