"""`run.json` beside a checkpoint: what was run, with what and on what, one entry for each start.

A training that goes on from its checkpoint adds an entry; what the earlier starts were stays.
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from hf_spec.common.files import atomic_write
from hf_spec.common.machine import environment

RUN = "run.json"

# Of torch and transformers, and of hf_spec itself, `environment` knows.
PACKAGES = ("accelerate", "huggingface_hub", "peft", "safetensors", "tokenizers")

_options: ContextVar[Mapping[str, Any] | None] = ContextVar("options", default=None)


@contextmanager
def with_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Let the starts within know the options of their command, from all sources and by default."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def record_start(
    folder: Path, settings: Mapping[str, Any], step: int, device: torch.device
) -> None:
    """Add this start, after `step` steps, to the run record beside a checkpoint."""
    path = folder / RUN
    starts = json.loads(path.read_text(encoding="utf-8"))["starts"] if path.exists() else []
    starts.append(
        {
            "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "command": shlex.join(sys.argv),
            "options": _options.get(),
            "settings": settings,
            "step": step,
            "environment": environment(device),
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        }
    )
    with atomic_write(path) as part:
        # Paths are written as the user types them.
        part.write_text(json.dumps({"starts": starts}, indent=1, default=str), "utf-8")
