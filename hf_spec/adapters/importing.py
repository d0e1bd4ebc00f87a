"""Published pickles made into safetensors, at the user's explicit command.

Nothing else of this library loads a pickle. Here torch unpickles with `weights_only=True`, which
builds tensors and plain containers and refuses all else.
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
from hf_spec.adapters.hub import Place
from hf_spec.adapters.published import CONFIG, MTP_INSIDE, recognise, write_published
from hf_spec.adapters.reading import PICKLES, read_json, regular_file
from hf_spec.common.errors import AssistantError
from hf_spec.common.files import check_new_folder

# Of tensors that strategies can read, see `hf_spec.adapters.reading`.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool)
# Of the repository, what is looked at.
LOOKED_AT = (CONFIG, CARD_NAME, *(f"*{ending}" for ending in sorted(PICKLES)))


def import_head(name: str | os.PathLike[str], out: Path) -> Path:
    """Write the published head `name`, a folder or Hub id with pickles, as safetensors to `out`.

    `out` is a new or empty folder; it gets config, weights, and a card that says where they are
    from. Returned is its path.

    Raises:
        OptionError: if there is something in `out`.
        AssistantError: if it is no published head, or has no pickle that holds tensors alone.
        HubError: if the Hub cannot be reached.
    """
    check_new_folder(out)
    folder = Path(name)
    if not folder.is_dir():
        folder = Place.of(os.fspath(name)).fetch(LOOKED_AT)
    config = read_json(regular_file(folder, CONFIG))
    family = recognise(config)
    if family is None or family == MTP_INSIDE:
        raise AssistantError(f"{os.fspath(name)!r} is no published head: its config describes none")
    files = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if not files:
        raise AssistantError(f"{os.fspath(name)!r} has no pickle file; nothing needs converting")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors.update(_unpickled(regular_file(folder, file)))
    digests = {file: _digest(folder / file) for file in files}
    write_published(out, config, tensors, _card(os.fspath(name), family, digests, folder))
    return out


def _unpickled(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle that holds nothing else."""
    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # The unpickler raises whatever it stumbles over.
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise AssistantError(f"{path} cannot be read as tensors alone: {reason}") from error
    if not isinstance(found, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
    ):
        raise AssistantError(f"{path} holds more than named tensors, so it is not converted")
    for key, tensor in found.items():
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_meta:
            raise AssistantError(
                f"{path}: {key!r} is of {tensor.dtype}, {tensor.layout} on {tensor.device}, which "
                "is no plain weight, so it is not converted"
            )
    return dict(found)


def _digest(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def licence_of(folder: Path) -> str | None:
    """The licence that the card in a folder names."""
    if not (folder / CARD_NAME).is_file():
        return None
    try:
        licence: str | None = ModelCard.load(regular_file(folder, CARD_NAME)).data.license
    except (ValueError, TypeError, YAMLError):
        return None
    return licence


def _card(name: str, family: str, digests: Mapping[str, str], folder: Path) -> str:
    """A card with the source, and the licence that its own card names."""
    licence = licence_of(folder)
    lines = [
        *(["---", f"license: {licence}", "---", ""] if licence else []),
        GENERATED,
        "",
        f"# {name} as safetensors",
        "",
        f"A head of the family `{family}`, converted by `hf-spec import-head`. The weights are",
        f"those of `{name}`, whose licence applies"
        + (f" ({licence})." if licence else "; its own card says which."),
        "",
        "| file | sha256 |",
        "|---|---|",
        *(f"| `{file}` | `{digest}` |" for file, digest in digests.items()),
        "",
    ]
    return "\n".join(lines)
