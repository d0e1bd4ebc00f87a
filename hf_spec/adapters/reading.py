"""Safe reading of adapter files, which may be malicious or damaged.

Nothing is executed, and no link out of the folder is followed. Memory is bounded by the size of the
files, or eight times that for quantized weights. Problems raise an `AssistantError` that names the
file, option or weight.
"""

from __future__ import annotations

import json
import stat
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from hf_spec.adapters.quantized import DTYPE_NAMES
from hf_spec.common.errors import AssistantError

# Configs are far smaller.
MAX_CONFIG_BYTES = 4 << 20
# Name of the tensor with the tokens that an adapter can draft, if these are not all.
VOCABULARY = "vocabulary"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
# Names that safetensors gives the dtypes of weights and of token ids.
FLOATS = {"F32", "F16", "BF16"}
INTEGERS = {"I32", "I64"}


def regular_file(folder: Path, name: str) -> Path:
    """Return the path of file `name` in `folder`, which must not be a link out of the folder."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except FileNotFoundError as error:
        raise AssistantError(f"{folder} has no {name}, so it is not an adapter") from error
    except (OSError, RuntimeError) as error:
        raise AssistantError(f"{path} cannot be read: {error}") from error
    home = folder.resolve()
    # In the Hub's cache the files of a snapshot are links to blobs/.
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(parent) for parent in homes):
        raise AssistantError(f"{path} is a link out of its folder; links are not followed")
    if not stat.S_ISREG(kind):
        raise AssistantError(f"{path} is not a regular file")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file of at most `MAX_CONFIG_BYTES`."""
    try:
        size = path.stat().st_size
        config = json.loads(path.read_text(encoding="utf-8")) if size <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError) as error:
        raise AssistantError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise AssistantError(f"{path} cannot be read: {error}") from error
    if size > MAX_CONFIG_BYTES:
        raise AssistantError(f"{path} has {size} bytes; a config has at most {MAX_CONFIG_BYTES}")
    if not isinstance(config, dict):
        raise AssistantError(f"{path} holds a {type(config).__name__}, not the object of a config")
    return config


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """Return the tensors of an adapter's safetensors file, see `tensors_of`."""
    if not (folder / name).exists():
        pickles = pickles_in(folder)
        hint = f"; {pickles[0]} is a pickle file, which is never loaded" if pickles else ""
        raise AssistantError(f"adapter {str(folder)!r} has no {name}{hint}")
    return tensors_of(regular_file(folder, name), dtypes=DTYPE_NAMES)


def pickles_in(folder: Path) -> list[str]:
    """Return the names of the pickle files in a folder, sorted."""
    return sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)


def tensors_of(
    path: Path, wanted: Callable[[str], bool] | None = None, dtypes: Collection[str] = ()
) -> dict[str, Tensor]:
    """Return the `wanted` tensors of a safetensors file, by default all, on the CPU.

    `dtypes` are allowed besides finite floats and token ids.
    """
    tensors = {}
    # safetensors' own error derives from Exception alone, and unknown dtypes raise other errors.
    try:
        with safe_open(path, framework="pt") as file:
            for key in filter(wanted, file.keys()):
                dtype = file.get_slice(key).get_dtype()
                if dtype not in {*FLOATS, *INTEGERS, *dtypes}:
                    raise AssistantError(
                        f"{path}: {key!r} is of type {dtype}; weights are of "
                        f"{', '.join(sorted(FLOATS))}"
                    )
                tensors[key] = file.get_tensor(key)
    except AssistantError:
        raise
    except Exception as error:
        raise AssistantError(f"{path} cannot be read: {error}; get the file again") from error
    for key, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise AssistantError(
                f"{path}: {key!r} holds NaN or infinite values; get the file again"
            )
    return tensors


def check_tensors(
    what: str,
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    source: str = "its own config",
) -> None:
    """Raise `AssistantError` unless `tensors` are floats of the shapes `expected` from `source`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted({*shapes, *expected}):
        wanted = tuple(expected[name]) if name in expected else "absent"
        if (shape := shapes.get(name, "missing")) != wanted:
            raise AssistantError(f"{what} does not fit {source}: {name} is {shape}, not {wanted}")
        if not tensors[name].is_floating_point():
            raise AssistantError(f"{what} is damaged: {name} is of {tensors[name].dtype}")


def read_vocabulary(what: str, tensors: Mapping[str, Tensor], size: int) -> Tensor | None:
    """Return the token ids that an adapter can draft, (R,) int64 below `size`; None for all."""
    listed = tensors.get(VOCABULARY)
    if listed is None:
        return None
    if listed.ndim != 1 or listed.is_floating_point() or not len(listed):
        raise AssistantError(
            f"{what} is damaged: {VOCABULARY} is of shape {tuple(listed.shape)} and "
            f"{listed.dtype}, not a list of tokens"
        )
    tokens = listed.long()
    if int(tokens[0]) < 0 or int(tokens[-1]) >= size or bool((tokens.diff() <= 0).any()):
        raise AssistantError(
            f"{what} is damaged: {VOCABULARY} does not list tokens below {size} in ascending order"
        )
    return tokens


def whole_number(what: str, options: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return the option `name`, which must be a whole number from `low` to `high`."""
    value = options.get(name)
    if type(value) is not int or not low <= value <= high:
        raise AssistantError(
            f"{what} has {name}={value!r}, which must be a whole number from {low} to {high}"
        )
    return value
