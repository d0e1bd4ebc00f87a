"""Conversion of published pickles to safetensors, at the user's explicit command.

No other part of the library loads pickles. Here torch unpickles with `weights_only=True`, which
allows tensors and plain containers only.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import ModelCard
from torch import Tensor
from yaml import YAMLError

from hf_spec.adapters.card import CARD_NAME, GENERATED
from hf_spec.adapters.hub import HubRepo
from hf_spec.adapters.published import CONFIG, MTP_INSIDE, not_a_head, recognize, write_published
from hf_spec.adapters.reading import PICKLES, pickles_in, read_json, regular_file
from hf_spec.common.errors import AssistantError
from hf_spec.common.files import check_new_folder

# Dtypes that `hf_spec.adapters.reading` allows.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
# Files of the repository that are fetched.
FETCHED = (CONFIG, CARD_NAME, *(f"*{ending}" for ending in sorted(PICKLES)))


def import_head(name: str | os.PathLike[str], out: Path) -> Path:
    """Convert the pickles of a published head, a folder or Hub id, to safetensors; return `out`.

    `out`, a new or empty folder, gets the config, the weights, and a card that names the source.
    Raises `AssistantError` if `name` is not a published head, or has no pickle of tensors alone,
    and `HubError` if the Hub cannot be reached.
    """
    check_new_folder(out)
    folder = Path(name)
    if not folder.is_dir():
        folder = HubRepo.of(os.fspath(name)).fetch(FETCHED)
    config = read_json(regular_file(folder, CONFIG))
    family = recognize(config)
    if family is None or family == MTP_INSIDE:
        raise not_a_head(name)
    files = pickles_in(folder)
    if not files:
        raise AssistantError(f"{os.fspath(name)!r} has no pickle file; nothing needs converting")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_unpickled(regular_file(folder, file)))
    digests = {file: _digest(folder / file) for file in files}
    write_published(out, config, tensors, _card(os.fspath(name), family, digests, folder))
    return out


def _unpickled(path: Path) -> dict[str, Tensor]:
    try:
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The unpickler raises errors of any type.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AssistantError(f"{path} cannot be read as tensors alone: {reason}") from error
    if not isinstance(content, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in content.items()
    ):
        raise AssistantError(f"{path} holds more than named tensors, so it is not converted")
    for key, tensor in content.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise AssistantError(
                f"{path}: {key!r} is of {tensor.dtype}, {tensor.layout} on {tensor.device}, which "
                "is not a plain weight, so it is not converted"
            )
    return dict(content)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def license_of(folder: Path) -> str | None:
    """Return the license that the card in a folder names."""
    if not (folder / CARD_NAME).is_file():
        return None
    try:
        name: str | None = ModelCard.load(regular_file(folder, CARD_NAME)).data.license
    except (ValueError, TypeError, YAMLError):
        return None
    return name


def _card(name: str, family: str, digests: Mapping[str, str], folder: Path) -> str:
    license_name = license_of(folder)
    head = f"---\nlicense: {license_name}\n---\n\n" if license_name else ""
    terms = f" ({license_name})." if license_name else "; see its own card."
    rows = "".join(f"| `{file}` | `{digest}` |\n" for file, digest in digests.items())
    return f"""{head}{GENERATED}

# {name} as safetensors

A head of the family `{family}`, converted by `hf-spec import-head`. The weights are
those of `{name}`, whose license applies{terms}

| file | sha256 |
|---|---|
{rows}"""
