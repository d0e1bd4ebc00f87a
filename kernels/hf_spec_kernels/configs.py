"""Tile sizes of a kernel by device and shape, tuned offline.

An op's folder contains `default.json`, safe on every GPU, and one file per tuned GPU, named after
it. Each maps a shape key to the keyword arguments of a launch. Nothing is tuned at run time.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

FOLDER = Path(__file__).parent
_log = logging.getLogger(__name__)
_tried: dict[str, dict[str, int]] = {}


def config(op: str, key: str, device: torch.device) -> dict[str, int]:
    """Return the launch arguments of `op`, a folder name, for a key of its `default.json`."""
    if op in _tried:
        return _tried[op]
    tuned = _read(op, device_name(device)).get(key) if device.type == "cuda" else None
    return tuned or _read(op, "default")[key]


def vocabulary_config(op: str, rows: Tensor) -> dict[str, int]:
    """Return the launch arguments of an op over (N, V) rows; V limits the block size."""
    chosen = config(op, f"{8 * rows.element_size()}bit", rows.device)
    widest = max(16, 1 << (rows.shape[1] - 1).bit_length())
    return {**chosen, "BLOCK_V": min(chosen["BLOCK_V"], widest)}


@contextmanager
def trying(op: str, arguments: dict[str, int]) -> Iterator[None]:
    """Launch `op` with these arguments inside the block, whatever the shape."""
    _tried[op] = arguments
    try:
        yield
    finally:
        del _tried[op]


def config_file(op: str, name: str) -> Path:
    """Return the file of configurations of `op`, for a device name or "default"."""
    return FOLDER / op / f"{name}.json"


@cache
def device_name(device: torch.device) -> str:
    """Return the GPU's name for a file name, such as `nvidia_h100_80gb_hbm3`."""
    return re.sub(r"\W+", "_", torch.cuda.get_device_name(device)).strip("_").lower()


@cache
def num_processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 1 in the interpreter."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _read(op: str, name: str) -> dict[str, dict[str, int]]:
    file = config_file(op, name)
    if not file.is_file():
        _log.warning(
            "%s has no tile sizes for %s and uses the defaults; to tune it, run in a "
            "checkout of hf-spec: python -m examples.studies.kernels.tune",
            op,
            name,
        )
        return {}
    configs: dict[str, dict[str, int]] = json.loads(file.read_text(encoding="utf-8"))
    return configs
