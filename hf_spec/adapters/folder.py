"""A trained part of a method as a folder: a config, tensors, and the base model they belong to.

The shape is PEFT's: `adapter_config.json` and `adapter_model.safetensors`. The base is known by its
sizes and by a few of its weights, rounded, so that the same model is recognised in any dtype and
another one is refused with a sentence.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters import hub
from hf_spec.adapters.base_name import base_name
from hf_spec.adapters.custom_code import write_custom_generate
from hf_spec.adapters.reading import read_json, read_tensors, regular_file
from hf_spec.errors import AssistantError
from hf_spec.execution.placement import weight_rows
from hf_spec.files import written_whole

PEFT_TYPE = "HF_SPEC"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
# The methods, and the strategy that an adapter of each is for where none is named.
STRATEGIES = {"draft": "tree", "disco": "disco", "falcon": "falcon", "sdsat": "sdsat"}

# Weights of the embedding that identify a base; evenly spread over the table.
FINGERPRINT_SIZE = 32
# Share of the largest weight. Rounding to half precision changes a weight by less, and so do the
# 8 bits that GGUF files store the embedding of SmolLM2 in: by 1.5 % of it at these places at most.
FINGERPRINT_TOLERANCE = 2.0**-6


@dataclass(frozen=True)
class BaseModel:
    """What identifies the model that an adapter was trained for.

    Attributes:
        name: Hub id or, if there is none, folder name, for messages and model cards.
        hidden_size, num_layers, vocab_size: of its text model.
        fingerprint: some of its embedding weights.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    fingerprint: tuple[float, ...]

    @classmethod
    def read(cls, values: Any, path: Path) -> BaseModel:
        """The identity that the config at `path` holds.

        Raises:
            AssistantError: if it is incomplete, or a value is of no use.
        """
        try:
            base = cls(**{**values, "fingerprint": tuple(values["fingerprint"])})
        except (KeyError, TypeError) as error:
            raise AssistantError(f"{path} is incomplete: {error!r}") from error
        sizes = (base.hidden_size, base.num_layers, base.vocab_size)
        known = isinstance(base.name, str) and all(type(s) is int and s > 0 for s in sizes)
        if not known or not all(_is_finite(value) for value in base.fingerprint):
            raise AssistantError(f"{path} does not say what its base model is: {base}"[:500])
        if len(base.fingerprint) != FINGERPRINT_SIZE:
            raise AssistantError(
                f"{path} knows its base model by {len(base.fingerprint)} weights, not "
                f"{FINGERPRINT_SIZE}: get the file again, or train the adapter again"
            )
        return base

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """The identity of `model`."""
        config: Any = model.config.get_text_config()
        embedding: Any = model.get_input_embeddings()
        size, width = embedding.weight.numel(), embedding.weight.shape[1]
        places = torch.linspace(0, size - 1, FINGERPRINT_SIZE, dtype=torch.float64).long()
        rows = weight_rows(embedding, places // width).float()
        sample = rows.gather(1, (places % width)[:, None].to(rows.device))[:, 0].tolist()
        return cls(
            base_name(model),
            config.hidden_size,
            config.num_hidden_layers,
            config.vocab_size,
            tuple(float(f"{value:.6g}") for value in sample),
        )

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that is not this one.

        Raises:
            AssistantError: names what differs, on both sides.
        """
        other = BaseModel.of(model)
        for name in ("hidden_size", "num_layers", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise AssistantError(
                    f"the adapter was trained for {self.name!r} with {name} {mine}; "
                    f"{other.name!r} has {theirs}: load the adapter's own base model"
                )
        pairs = zip(self.fingerprint, other.fingerprint, strict=True)
        scale = max(abs(value) for value in self.fingerprint)
        if any(abs(a - b) > FINGERPRINT_TOLERANCE * scale for a, b in pairs):
            raise AssistantError(
                f"the adapter was trained for {self.name!r}; {other.name!r} has the same sizes but "
                "other weights: load the adapter's own base model, or train an adapter for this one"
            )


# Compared by identity: weights are no values.
@dataclass(frozen=True, eq=False)
class SpecAdapter:
    """A trained part of a method.

    Attributes:
        method: "draft", "disco", "falcon" or "sdsat".
        base: the model it belongs to.
        options: JSON values; what the method needs to rebuild its module, and measured numbers.
        tensors: the weights.
        folder: where it was loaded from.
        repo_id: its name on the Hub, if it comes from there.
    """

    method: str
    base: BaseModel
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path | None = None
    repo_id: str | None = None

    @property
    def strategy(self) -> str:
        """The strategy that it is for, if no other is named.

        Raises:
            AssistantError: if its method is unknown.
        """
        self.check_method()
        return STRATEGIES[self.method]

    def check_method(self) -> None:
        """Refuse a method that this version does not know.

        Raises:
            AssistantError: names it, and those that there are.
        """
        if self.method not in STRATEGIES:
            raise AssistantError(
                f"adapter {str(self.folder)!r} is one of method {self.method!r}; known methods: "
                f"{', '.join(STRATEGIES)}"
            )

    @classmethod
    def from_pretrained(
        cls,
        name: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> SpecAdapter:
        """Read an adapter from a folder or from the Hub; see `load_adapter`."""
        return load_adapter(name, revision=revision, token=token)

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write it to `folder`; see `save_adapter`."""
        save_adapter(folder, self)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool = False,
        token: str | None = None,
        revision: str | None = None,
    ) -> str:
        """Put it on the Hub, with the card of its folder or a new one.

        Args:
            repo_id: "owner/name"; made if need be.
            private: whether a repository that is made is private.
            token: of the Hub; by default the stored one.
            revision: branch; made if need be. The main one by default.

        Returns:
            The address of the commit.

        Raises:
            AssistantError: if the Hub refuses.
        """
        from hf_spec.adapters.card import CARD_NAME, write_card

        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch) / repo_id.rpartition("/")[2]
            save_adapter(folder, self)
            if self.folder is not None and (self.folder / CARD_NAME).exists():
                card = regular_file(self.folder, CARD_NAME).read_bytes()
                (folder / CARD_NAME).write_bytes(card)
            else:
                write_card(folder)
            return hub.push_adapter(
                folder, repo_id, private=private, token=token, revision=revision
            )


def save_adapter(folder: str | os.PathLike[str], adapter: SpecAdapter) -> None:
    """Write `adapter` to `folder`, each file in one rename, the config last.

    Args:
        folder: created if need be; a model card in it stays.
        adapter: its tensors are stored in their own dtypes.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in adapter.tensors.items()}
    config = {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": adapter.base.name,
        "method": adapter.method,
        "options": adapter.options,
        "base": asdict(adapter.base),
    }
    write_custom_generate(folder)
    with written_whole(folder / WEIGHTS_NAME) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    with written_whole(folder / CONFIG_NAME) as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(
    name: str | os.PathLike[str],
    method: str | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
) -> SpecAdapter:
    """Read an adapter. Nothing in it is executed, `custom_generate/` not even looked at.

    Args:
        name: a folder, or a Hub id such as "org/name" or "org/name@revision".
        method: what it must be an adapter of; any by default.
        revision: branch, tag or commit on the Hub.
        token: of the Hub; by default the stored one.

    Raises:
        AssistantError: if it is missing, damaged, or of another method.
    """
    folder, repo_id = Path(name), None
    if not folder.is_dir():
        place = hub.Place.of(os.fspath(name), revision, token)
        folder, repo_id = place.fetch((CONFIG_NAME, WEIGHTS_NAME, "README.md")), place.repo_id
    config = _read_config(folder)
    if method is not None and config["method"] != method:
        raise AssistantError(
            f"adapter {os.fspath(name)!r} is one of method {config['method']!r}, not {method!r}"
        )
    base = BaseModel.read(config["base"], folder / CONFIG_NAME)
    # Saved by transformers, an adapter's names have PEFT's prefix in front.
    tensors = {
        key.removeprefix("base_model.model."): tensor
        for key, tensor in read_tensors(folder, WEIGHTS_NAME).items()
    }
    return SpecAdapter(config["method"], base, config["options"], tensors, folder, repo_id)


def is_adapter(name: object, revision: str | None = None, token: str | bool | None = None) -> bool:
    """Whether `name` is a folder or a Hub id of an adapter of this library.

    Args:
        name: of any type; a Hub id that cannot be had is none.
        revision: branch, tag or commit on the Hub.
        token: of the Hub; by default the stored one.
    """
    if not isinstance(name, (str, os.PathLike)):
        return False
    try:
        folder = Path(name)
        if not folder.is_dir():
            folder = hub.Place.of(os.fspath(name), revision, token).fetch((CONFIG_NAME,))
        return read_json(regular_file(folder, CONFIG_NAME)).get("peft_type") == PEFT_TYPE
    except AssistantError:
        return False


def beside(adapter: SpecAdapter, name: str) -> str:
    """What an adapter means by the name of another folder or repository.

    Args:
        adapter: which says so.
        name: "../name", a folder beside its own or a repository of the same owner; "name", a
            folder inside its own; or a Hub id.

    Raises:
        AssistantError: if the name leads anywhere else.
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
        raise AssistantError(f"{path} names no peft_type, so it is no adapter")
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


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
