"""`run.json` beside a checkpoint: command, settings and environment of every start."""

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

# `environment` has the versions of torch, transformers and hf_spec.
PACKAGES = ("accelerate", "huggingface_hub", "peft", "safetensors", "tokenizers")

_options: ContextVar[Mapping[str, Any] | None] = ContextVar("options", default=None)


@contextmanager
def with_options(options: Mapping[str, Any]) -> Iterator[None]:
    """Add `options`, all options of the command, to the run records of starts within."""
    token = _options.set(options)
    try:
        yield
    finally:
        _options.reset(token)


def record_start(
    folder: Path, settings: Mapping[str, Any], step: int, device: torch.device
) -> None:
    """Add this start, after `step` steps, to those in the run record beside a checkpoint."""
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
        # default=str writes paths as the user typed them.
        part.write_text(json.dumps({"starts": starts}, indent=1, default=str), "utf-8")
