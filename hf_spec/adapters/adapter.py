"""What an adapter is: a trained part of a method, and the base model it belongs to.

The base is known by its sizes and by a few of its weights, rounded, so that the same model is
recognised in any dtype and another one is refused with a sentence.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.base_name import base_name
from hf_spec.adapters.few_bits import BITS, packed
from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.common.files import atomic_write
from hf_spec.common.installing import how_to_install
from hf_spec.engine.models.cross_attention import num_layers

PEFT_TYPE = "HF_SPEC"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

# The code that travels with an adapter, the same in every one, for users who have not met hf_spec.
# Where `generate` is told custom_generate="org/adapter" and trust_remote_code=True, transformers
# copies it out of the repository and calls its `generate`; only this ever runs it.
FOLDER = "custom_generate"
FILES = {
    "generate.py": '''\
"""Generates with this adapter: custom_generate=<its repository>, trust_remote_code=True.

Needs the package hf-spec (see requirements.txt), which does the work.
"""

from hf_spec import custom_generate as generate

__all__ = ["generate"]
''',
    "requirements.txt": f"# To install it, {how_to_install()}.\nhf-spec>=0.1\n",
}

# Weights of the embedding that identify a base; evenly spread over the table.
FINGERPRINT_SIZE = 32
# Share of the largest weight. Rounding to half precision changes a weight by less, and so do the
# 8 bits that GGUF files store embeddings in: at these places by 1.5 % of it at most for SmolLM2, by
# 2.6 % for Gemma-3-270M.
FINGERPRINT_TOLERANCE = 2.0**-5


@dataclass(frozen=True)
class AdapterMethod:
    """A method that has a trained part; the module of that part registers it.

    Attributes:
        name, strategy: as adapters name it, and what they are for where none is named.
        title: of model cards, with {} for the base.
        build: makes what the strategy works with from a `SpecAdapter` and the target.
    """

    name: str
    strategy: str
    title: str
    build: Callable[[Any, PreTrainedModel], Any]


_METHODS: dict[str, AdapterMethod] = {}


def register_method(method: AdapterMethod) -> None:
    """Make adapters of a method known, whose name must not be taken (`ValueError`)."""
    if method.name in _METHODS:
        raise ValueError(f"there is an adapter method {method.name!r} already")
    _METHODS[method.name] = method


def known_methods() -> list[str]:
    """Names of all registered methods, sorted."""
    return sorted(_METHODS)


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

        Incomplete ones, and values that cannot be used, are an `AssistantError`.
        """
        try:
            base = cls(**{**values, "fingerprint": tuple(values["fingerprint"])})
        except (KeyError, TypeError) as error:
            raise AssistantError(f"{path} is incomplete: {error!r}") from error
        sizes = (base.hidden_size, base.num_layers, base.vocab_size)
        known = isinstance(base.name, str) and all(type(s) is int and s > 0 for s in sizes)
        weights = base.fingerprint
        if not known or not all(isinstance(w, (int, float)) and math.isfinite(w) for w in weights):
            raise AssistantError(f"{path} does not say what its base model is: {base}"[:500])
        if len(weights) != FINGERPRINT_SIZE:
            raise AssistantError(
                f"{path} knows its base model by {len(weights)} weights, not {FINGERPRINT_SIZE}: "
                "get the file again, or train the adapter again"
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
            num_layers(model),
            config.vocab_size,
            tuple(float(f"{value:.6g}") for value in sample),
        )

    def difference(self, other: BaseModel) -> str | None:
        """What tells another model from this one, with both names; None if it is the same."""
        for name in ("hidden_size", "num_layers", "vocab_size"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return f"{self.name!r} with {name} {mine}; {other.name!r} has {theirs}"
        pairs = zip(self.fingerprint, other.fingerprint, strict=True)
        scale = max(abs(value) for value in self.fingerprint)
        if any(abs(a - b) > FINGERPRINT_TOLERANCE * scale for a, b in pairs):
            return f"{self.name!r}; {other.name!r} has the same sizes but other weights"
        return None

    def check(self, model: PreTrainedModel) -> None:
        """Refuse a model that an adapter of this one is not for (`AssistantError`)."""
        if (difference := self.difference(BaseModel.of(model))) is not None:
            raise AssistantError(
                f"the adapter was trained for {difference}: load the adapter's own base model, or "
                "train an adapter for this one"
            )


# Compared by identity: weights are no values.
@dataclass(frozen=True, eq=False)
class Adapter:
    """What a `SpecAdapter` holds; that class loads, saves and pushes it."""

    method: str
    base: BaseModel
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path | None = None
    repo_id: str | None = None
    bits: int = BITS[0]

    @property
    def record(self) -> AdapterMethod:
        """Its method; an `AssistantError` if this version does not know it."""
        if self.method not in _METHODS:
            raise AssistantError(
                f"adapter {str(self.folder)!r} is one of method {self.method!r}; known methods: "
                f"{', '.join(known_methods())}"
            )
        return _METHODS[self.method]

    @property
    def strategy(self) -> str:
        """The strategy that it is for, if no other is named."""
        return self.record.strategy

    @property
    def largest(self) -> int:
        """Numbers in its largest tensor, beyond which no size in its options can lie."""
        return max((tensor.numel() for tensor in self.tensors.values()), default=1)

    @property
    def own_folder(self) -> Path:
        """The folder it was loaded from, none of the Hub's cache; or an `AssistantError`."""
        if self.folder is None or self.repo_id is not None:
            raise AssistantError("the adapter has no folder of its own; save it to one first")
        return self.folder


def save_adapter(folder: str | os.PathLike[str], adapter: Adapter) -> None:
    """Write `adapter` to `folder`, each file in one rename, the config last.

    The folder is created if need be, and a model card in it stays. Tensors keep their dtypes, or
    matrices are stored in as many bits as the adapter says.
    """
    if adapter.bits not in BITS:
        raise OptionError(f"bits={adapter.bits!r}: weights are stored in 16, 8 or 4 bits")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in packed(adapter.tensors, adapter.bits).items()
    }
    config = {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": adapter.base.name,
        "method": adapter.method,
        "options": adapter.options,
        "base": asdict(adapter.base),
    }
    write_custom_generate(folder)
    with atomic_write(folder / WEIGHTS_NAME) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    with atomic_write(folder / CONFIG_NAME) as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def write_custom_generate(folder: Path) -> None:
    """Write the files to an adapter's `folder`."""
    target = folder / FOLDER
    target.mkdir(exist_ok=True)
    for name, text in FILES.items():
        with atomic_write(target / name) as part:
            part.write_text(text, encoding="utf-8")
