"""Facts about the machine that a measurement or a training ran on."""

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

# What Linux calls the instructions, x86 and ARM.
BFLOAT16 = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Device, processor, threads, versions, and the commit if the package is in a git checkout.

    The device is the one that was measured, by default the GPU if there is one.
    """
    on_gpu = torch.cuda.is_available() if device is None else device.type == "cuda"
    found = {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "cpu": _processor(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    # Ourselves and the peer, if installed as distributions, which have either kind of dash.
    for name in ("hf_spec", "economize"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {**found, **_commit()}


def _processor() -> str:
    """The processor's own name where Linux knows it."""
    file = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.+)", file.read_text()) if file.exists() else None
    return named[1] if named else platform.processor() or platform.machine()


@cache
def has_bfloat16() -> bool:
    """Whether the processor multiplies bfloat16 numbers itself; assumed where nothing says so."""
    file = Path("/proc/cpuinfo")
    known = re.search(r"(?:flags|Features)\s*: (.+)", file.read_text()) if file.exists() else None
    return known is None or not BFLOAT16.isdisjoint(known[1].split())


@cache
def _commit() -> dict[str, Any]:
    """The commit of the checkout and whether files differ from it; nothing without a checkout."""
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(here.parent), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()

    try:
        # An environment may lie in the checkout of another project.
        if not git("ls-files", here.name):
            return {}
        changed = bool(git("status", "--short", "--untracked-files=no"))
        return {"commit": git("rev-parse", "HEAD"), "commit_changed": changed}
    except OSError:
        return {}
