"""A trained part of a method as a folder: a config, tensors, and the base model they belong to.

The shape is PEFT's: `adapter_config.json` and `adapter_model.safetensors`. The base is known by its
sizes and by a few of its weights, rounded, so that the same model is recognised in any dtype and
another one is refused with a sentence.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.errors import AssistantError
from hf_spec.files import written_whole

PEFT_TYPE = "HF_SPEC"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# Weights of the embedding that identify a base; evenly spread over the table.
FINGERPRINT_SIZE = 32
# Share of the largest weight; rounding to half precision changes a weight by less.
FINGERPRINT_TOLERANCE = 2.0**-7


@dataclass(frozen=True)
class BaseModel:
    """What identifies the model that an adapter was trained for.

    Attributes:
        name: Hub id or folder name, for messages and model cards.
        hidden_size, num_layers, vocab_size: of its text model.
        fingerprint: some of its embedding weights.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    fingerprint: tuple[float, ...]

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """The identity of `model`."""
        config: Any = model.config.get_text_config()
        embedding: Any = model.get_input_embeddings()
        table = embedding.weight.detach().flatten()
        places = torch.linspace(0, table.numel() - 1, FINGERPRINT_SIZE, dtype=torch.float64).long()
        sample = table[places.to(table.device)].float().tolist()
        return cls(
            os.path.basename(os.path.normpath(model.config.name_or_path or type(model).__name__)),
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


@dataclass(frozen=True)
class SpecAdapter:
    """A trained part of a method.

    Attributes:
        method: "draft", "disco", ...
        base: the model it belongs to.
        options: JSON values; what the method needs to rebuild its module, and measured numbers.
        tensors: the weights.
        folder: where it was loaded from.
    """

    method: str
    base: BaseModel
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path | None = field(default=None, compare=False)


def save_adapter(folder: str | os.PathLike[str], adapter: SpecAdapter) -> None:
    """Write `adapter` to `folder`, the weights first, each file in one rename.

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
    with written_whole(folder / WEIGHTS_NAME) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    with written_whole(folder / CONFIG_NAME) as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapter(
    name: str | os.PathLike[str], method: str | None = None, revision: str | None = None
) -> SpecAdapter:
    """Read an adapter.

    Args:
        name: a folder or a Hub id.
        method: what it must be an adapter of; any by default.
        revision: branch, tag or commit on the Hub.

    Raises:
        AssistantError: if it is missing, damaged, or of another method.
    """
    folder = _find(name, revision)
    config = _read_config(folder)
    weights = folder / WEIGHTS_NAME
    if not weights.exists():
        pickled = sorted(p.name for p in folder.iterdir() if p.suffix in {".bin", ".pt", ".pth"})
        hint = f"; {pickled[0]} is a pickle file, which is never loaded" if pickled else ""
        raise AssistantError(f"adapter {str(name)!r} has no {WEIGHTS_NAME}{hint}")
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        raise AssistantError(f"{weights} cannot be read: {error}; get the file anew") from error
    if method is not None and config["method"] != method:
        raise AssistantError(
            f"adapter {str(name)!r} is one of method {config['method']!r}, not {method!r}"
        )
    base = _read_base(config["base"], folder / CONFIG_NAME)
    return SpecAdapter(config["method"], base, config["options"], tensors, folder)


def is_adapter(name: object) -> bool:
    """Whether `name` is a local folder that holds an adapter of this library."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    try:
        config = json.loads((Path(name) / CONFIG_NAME).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("peft_type") == PEFT_TYPE


def _find(name: str | os.PathLike[str], revision: str | None) -> Path:
    folder = Path(name)
    if folder.is_dir():
        return folder
    try:
        allowed = [CONFIG_NAME, WEIGHTS_NAME, "README.md"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=allowed))
    except Exception as error:
        raise AssistantError(
            f"adapter {str(name)!r} is neither a folder nor to be had from the Hub: {error}"
        ) from error


def _read_config(folder: Path) -> Mapping[str, Any]:
    path = folder / CONFIG_NAME
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise AssistantError(f"{folder} has no {CONFIG_NAME}, so it is no adapter") from error
    except ValueError as error:
        raise AssistantError(f"{path} is no JSON: {error}") from error
    if not isinstance(config, dict) or "peft_type" not in config:
        raise AssistantError(f"{path} names no peft_type, so it is no adapter")
    if config["peft_type"] != PEFT_TYPE:
        raise AssistantError(
            f"{path} is a PEFT adapter of type {config['peft_type']!r}; one of type "
            f"{PEFT_TYPE!r} is needed (a LoRA belongs to its own model: load it with PEFT)"
        )
    missing = {"method", "options", "base"} - set(config)
    if missing:
        raise AssistantError(f"{path} lacks {', '.join(sorted(missing))}")
    return config


def _read_base(values: Mapping[str, Any], path: Path) -> BaseModel:
    try:
        base = BaseModel(**{**values, "fingerprint": tuple(values["fingerprint"])})
    except (KeyError, TypeError) as error:
        raise AssistantError(f"{path} is incomplete: {error!r}") from error
    if len(base.fingerprint) != FINGERPRINT_SIZE:
        raise AssistantError(
            f"{path} knows its base model by {len(base.fingerprint)} weights, not "
            f"{FINGERPRINT_SIZE}: get the file anew, or train the adapter again"
        )
    return base
