"""Reading the files of an adapter as what they may be: written by somebody else, or damaged.

Nothing here executes, follows a link out of the folder, or takes more memory than the files do,
but for weights in few bits: eight times as much at most.
Whatever is wrong is an `AssistantError` that names the file, or the option or weight.
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

from hf_spec.adapters.few_bits import KINDS
from hf_spec.common.errors import AssistantError

# More than the config of any adapter that was ever made here, by a factor of a hundred.
MAX_CONFIG_BYTES = 4 << 20
# The tensor with the tokens that an adapter can propose, if these are not all.
VOCABULARY = "vocabulary"
PICKLES = {".bin", ".pt", ".pth", ".pkl", ".ckpt"}
# What weights are stored in, and what token ids are, as safetensors calls them.
FLOATS = {"F32", "F16", "BF16"}
INTEGERS = {"I32", "I64"}


def regular_file(folder: Path, name: str) -> Path:
    """The file `name` of an adapter folder; no link that leads out of it."""
    path = folder / name
    try:
        real = path.resolve(strict=True)
        kind = real.stat().st_mode
    except FileNotFoundError as error:
        raise AssistantError(f"{folder} has no {name}, so it is no adapter") from error
    except (OSError, RuntimeError) as error:
        raise AssistantError(f"{path} cannot be read: {error}") from error
    home = folder.resolve()
    # The Hub's cache keeps the contents of a snapshot beside it.
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    if not any(real.is_relative_to(one) for one in homes):
        raise AssistantError(f"{path} is a link out of its folder, which is not followed")
    if not stat.S_ISREG(kind):
        raise AssistantError(f"{path} is no regular file")
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most `MAX_CONFIG_BYTES`."""
    try:
        size = path.stat().st_size
        found = json.loads(path.read_text(encoding="utf-8")) if size <= MAX_CONFIG_BYTES else None
    except (ValueError, RecursionError) as error:
        raise AssistantError(f"{path} is no JSON: {error}") from error
    except OSError as error:
        raise AssistantError(f"{path} cannot be read: {error}") from error
    if size > MAX_CONFIG_BYTES:
        raise AssistantError(f"{path} has {size} bytes; a config has {MAX_CONFIG_BYTES} at most")
    if not isinstance(found, dict):
        raise AssistantError(f"{path} holds a {type(found).__name__}, not the object of a config")
    return found


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of an adapter's safetensors file; see `tensors_of`."""
    if not (folder / name).exists():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        hint = f"; {pickles[0]} is a pickle file, which is never loaded" if pickles else ""
        raise AssistantError(f"adapter {str(folder)!r} has no {name}{hint}")
    return tensors_of(regular_file(folder, name), kinds=KINDS)


def tensors_of(
    path: Path, wanted: Callable[[str], bool] | None = None, kinds: Collection[str] = ()
) -> dict[str, Tensor]:
    """The tensors of a safetensors file, of finite floats or whole numbers or `kinds`, on the CPU.

    Only those whose name is `wanted` are read, all by default.
    """
    tensors = {}
    # Its own error class derives from Exception alone, and odd dtypes raise others.
    try:
        with safe_open(path, framework="pt") as file:
            for key in filter(wanted, file.keys()):
                kind = file.get_slice(key).get_dtype()
                if kind not in {*FLOATS, *INTEGERS, *kinds}:
                    raise AssistantError(
                        f"{path}: {key!r} is of type {kind}; weights are of "
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
    found: Mapping[str, Tensor],
    expected: Mapping[str, Sequence[int]],
    source: str = "its own config",
) -> None:
    """Refuse weights that are not floats of the shapes which follow from their `source`."""
    shapes = {name: tuple(tensor.shape) for name, tensor in found.items()}
    for name in sorted({*shapes, *expected}):
        wanted = tuple(expected[name]) if name in expected else "absent"
        if (shape := shapes.get(name, "missing")) != wanted:
            raise AssistantError(f"{what} does not fit {source}: {name} is {shape}, not {wanted}")
        if not found[name].is_floating_point():
            raise AssistantError(f"{what} is damaged: {name} is of {found[name].dtype}")


def read_vocabulary(what: str, tensors: Mapping[str, Tensor], size: int) -> Tensor | None:
    """The tokens that an adapter can propose, listed in the tensor `VOCABULARY`.

    (R,) int64 below `size`, ascending, or None if there is no list and all are meant.
    """
    found = tensors.get(VOCABULARY)
    if found is None:
        return None
    if found.ndim != 1 or found.is_floating_point() or not len(found):
        raise AssistantError(
            f"{what} is damaged: {VOCABULARY} is of shape {tuple(found.shape)} and {found.dtype}, "
            "not a list of tokens"
        )
    tokens = found.long()
    if int(tokens[0]) < 0 or int(tokens[-1]) >= size or bool((tokens.diff() <= 0).any()):
        raise AssistantError(
            f"{what} is damaged: {VOCABULARY} does not list tokens below {size} in ascending order"
        )
    return tokens


def whole_number(what: str, options: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """An option that is a whole number from `low` to `high`."""
    value = options.get(name)
    if type(value) is not int or not low <= value <= high:
        raise AssistantError(
            f"{what} has {name}={value!r}, which must be a whole number from {low} to {high}"
        )
    return value
