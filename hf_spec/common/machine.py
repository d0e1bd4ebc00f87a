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
    """Return hardware, versions and commit; by default of the GPU if there is one."""
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    facts = {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
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
