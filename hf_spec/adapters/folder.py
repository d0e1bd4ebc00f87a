"""Adapter folders in PEFT's layout: `adapter_config.json` and `adapter_model.safetensors`.

They are read from disk or from the Hub. Nothing in them is executed.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any

from torch import nn

from hf_spec.adapters.adapter import (
    CONFIG_NAME,
    PEFT_TYPE,
    WEIGHTS_NAME,
    Adapter,
    BaseModel,
    save_adapter,
)
from hf_spec.adapters.card import CARD_NAME, write_card
from hf_spec.adapters.hub import HubRepo, push_adapter
from hf_spec.adapters.quantized import dequantize
from hf_spec.adapters.reading import read_json, read_tensors, regular_file
from hf_spec.common.errors import AssistantError

# Name of the module on a model that holds its adapters. It must not contain "hf_spec_", the prefix
# by which PEFT finds adapter weights.
LAYER_NAME = "spec_adapters"


class SpecAdapter(Adapter):
    """A trained part of a method.

    Attributes:
        method: a registered method, such as "draft", "disco", "falcon" or "sdsat".
        base: the model that it belongs to.
        options: JSON values from which the method rebuilds its module, and measured numbers.
        tensors: the weights.
        folder: the folder that it was loaded from.
        repo_id: its id if it was loaded from the Hub.
        bits: 16; 8 or 4 if its matrices are quantized on disk.
    """

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> SpecAdapter:
        """Read an adapter from a folder or from the Hub, see `load_adapter`."""
        return load_adapter(name, revision=revision, token=token)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write it to `folder`, see `save_adapter`."""
        save_adapter(folder, self)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Push it to the Hub, with the card and the license of its folder, or a new card.

        The repository `repo_id`, "owner/name", and the branch `revision` are created if they are
        missing. None is the main branch, and the stored token. Returns the URL of the commit.
        Raises `AssistantError` if the Hub cannot be reached, or rejects it.
        """
        repo = HubRepo(repo_id, revision, token)
        repo.check()
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / repo_id.rpartition("/")[2]
            copy = replace(self, folder=folder, repo_id=None)
            copy.save_pretrained(folder)
            for name in (CARD_NAME, "LICENSE"):
                if self.folder is not None and (self.folder / name).exists():
                    (folder / name).write_bytes(regular_file(self.folder, name).read_bytes())
            if not (folder / CARD_NAME).exists():
                write_card(copy)
            return push_adapter(copy, repo, private)


def load_adapter(
    name: str | os.PathLike[str],
    method: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> SpecAdapter:
    """Read an adapter from a folder, or "org/name" or "org/name@revision" on the Hub.

    Nothing in it is executed, and `custom_generate/` is not read. `method` is the one that it must
    have, `revision` a branch, tag or commit; None is any method, and the stored token. Raises
    `AssistantError` if the adapter is missing, damaged, or of another method.
    """
    folder, repo_id = Path(name), None
    if not folder.is_dir():
        repo = HubRepo.of(os.fspath(name), revision, token)
        folder, repo_id = repo.fetch((CONFIG_NAME, WEIGHTS_NAME, CARD_NAME)), repo.repo_id
    config = _read_config(folder)
    if method is not None and config["method"] != method:
        raise AssistantError(
            f"adapter {os.fspath(name)!r} is one of method {config['method']!r}, not {method!r}; "
            "use that method's strategy, or another adapter"
        )
    base = BaseModel.read(config["base"], folder / CONFIG_NAME)
    # Adapters that transformers saved have PEFT's prefix in front of the names.
    tensors = {
        key.removeprefix("base_model.model."): tensor
        for key, tensor in read_tensors(folder, WEIGHTS_NAME).items()
    }
    tensors, bits = dequantize(tensors, folder / WEIGHTS_NAME)
    return SpecAdapter(config["method"], base, config["options"], tensors, folder, repo_id, bits)


def is_adapter(name: object, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Return True if `name`, of any type, is a folder or a Hub id of an adapter of this library.

    It is False for a Hub id that is not available. `revision` and `token` as in `load_adapter`.
    """
    if not isinstance(name, (str, os.PathLike)):
        return False
    try:
        folder = Path(name)
        if not folder.is_dir():
            folder = HubRepo.of(os.fspath(name), revision, token).fetch((CONFIG_NAME,))
        return read_json(regular_file(folder, CONFIG_NAME)).get("peft_type") == PEFT_TYPE
    except AssistantError:
        return False


def active_adapters(model: nn.Module) -> list[SpecAdapter]:
    """Return the adapters of this library that are attached to `model` and active."""
    # Unrelated modules may have the same name. PEFT is not imported for this.
    active = getattr(getattr(model, LAYER_NAME, None), "active", ())
    if not isinstance(active, (list, tuple)):
        return []
    return [adapter for adapter in active if isinstance(adapter, SpecAdapter)]


def beside(adapter: SpecAdapter, name: str) -> str:
    """Return the folder or Hub id that an adapter refers to by `name`.

    "../name" is a folder beside its own or a repository of the same owner; "name" is a folder
    inside its own or a Hub id. Other paths raise `AssistantError`.
    """
    parts = PurePosixPath(name).parts
    inner = parts[1:] if parts[:1] == ("..",) else parts
    if not inner or ".." in inner or name.startswith(("/", "~")) or "\\" in name:
        raise AssistantError(
            f"{adapter.folder or 'the adapter'} names {name!r}, which is neither a folder beside "
            "it nor a Hub id"
        )
    if inner is not parts and adapter.repo_id is not None:
        return "/".join((adapter.repo_id.rpartition("/")[0], *inner))
    folder = (adapter.folder or Path()) / name
    return str(folder) if folder.is_dir() else name


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = regular_file(folder, CONFIG_NAME)
    config = read_json(path)
    if "peft_type" not in config:
        raise AssistantError(f"{path} has no peft_type, so it is not an adapter")
    if config["peft_type"] != PEFT_TYPE:
        raise AssistantError(
            f"{path} is a PEFT adapter of type {config['peft_type']!r}; one of type "
            f"{PEFT_TYPE!r} is needed (a LoRA belongs to its own model: load it with PEFT)"
        )
    for key, kind in (("method", str), ("options", dict), ("base", dict)):
        if key not in config:
            raise AssistantError(f"{path} lacks {key}")
        if not isinstance(config[key], kind):
            raise AssistantError(
                f"{path} has {key} of type {type(config[key]).__name__}, not {kind.__name__}"
            )
    return config
