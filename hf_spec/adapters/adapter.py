"""An adapter: a trained part of a method, and the identity of its base model.

The base is identified by its sizes and by a sample of its weights, compared up to rounding, so it
is recognized in any dtype.
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
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.quantized import BITS, quantize
from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import AssistantError, OptionError
from hf_spec.common.files import atomic_write
from hf_spec.common.installing import how_to_install
from hf_spec.common.small_models import hub_id_of
from hf_spec.engine.models.cross_attention import num_layers

PEFT_TYPE = "HF_SPEC"
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
# Folder of a model in the Hub's cache: <prefix><owner>--<name>/snapshots/<commit>.
CACHE_PREFIX = "models--"

# Code in every adapter folder, for users without `import hf_spec`. Only transformers runs it, after
# generate(custom_generate="org/adapter", trust_remote_code=True).
FOLDER = "custom_generate"
FILES = {
    "generate.py": '''\
"""Generate with this adapter: custom_generate=<its repository>, trust_remote_code=True.

Requires the package hf-spec (see requirements.txt).
"""

from hf_spec import custom_generate as generate

__all__ = ["generate"]
''',
    "requirements.txt": f"# To install it, {how_to_install()}.\nhf-spec>=0.1\n",
}

# Number of embedding weights that identify a base, evenly spread over the table.
FINGERPRINT_SIZE = 32
# Tolerance, relative to the largest weight of the fingerprint. Rounding to half precision changes a
# weight by less, and so does the 8-bit quantization of embeddings in GGUF files.
FINGERPRINT_TOLERANCE = 2.0**-5


@dataclass(frozen=True)
class AdapterMethod:
    """A method with a trained part, by its name in configs; the module of that part registers it.

    `strategy` is the default of its adapters, `title` that of model cards, with {} for the base.
    `build` makes the module that drafts from a `SpecAdapter` and the target.
    """

    name: str
    strategy: str
    title: str
    build: Callable[[Any, PreTrainedModel], Any]


_METHODS: dict[str, AdapterMethod] = {}


def register_method(method: AdapterMethod) -> None:
    """Register a method; a name that is taken raises `ValueError`."""
    if method.name in _METHODS:
        raise ValueError(f"there is an adapter method {method.name!r} already")
    _METHODS[method.name] = method


def known_methods() -> list[str]:
    """Return the names of all registered methods, sorted."""
    return sorted(_METHODS)


@dataclass(frozen=True)
class BaseModel:
    """Identity of the model that an adapter was trained for.

    `name` is a Hub id or, if there is none, a folder name, for messages and model cards. The sizes
    are those of its text model, `fingerprint` is a sample of its embedding weights.
    """

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    fingerprint: tuple[float, ...]

    @classmethod
    def read(cls, values: Any, path: Path) -> BaseModel:
        """Return the identity in `values` of the config at `path`; raise if it is invalid."""
        try:
            base = cls(**{**values, "fingerprint": tuple(values["fingerprint"])})
        except (KeyError, TypeError) as error:
            raise AssistantError(f"{path} is incomplete: {error!r}") from error
        sizes = (base.hidden_size, base.num_layers, base.vocab_size)
        valid = isinstance(base.name, str) and all(type(s) is int and s > 0 for s in sizes)
        weights = base.fingerprint
        if not valid or not all(isinstance(w, (int, float)) and math.isfinite(w) for w in weights):
            raise AssistantError(f"{path} does not identify its base model: {base}"[:500])
        if len(weights) != FINGERPRINT_SIZE:
            raise AssistantError(
                f"{path} identifies its base by {len(weights)} weights, not {FINGERPRINT_SIZE}: "
                "get the file again, or train the adapter again"
            )
        return base

    @classmethod
    def of(cls, model: PreTrainedModel) -> BaseModel:
        """Return the identity of `model`."""
        config: Any = model.config.get_text_config()
        embedding: Any = model.get_input_embeddings()
        size, width = embedding.weight.numel(), embedding.weight.shape[1]
        indices = torch.linspace(0, size - 1, FINGERPRINT_SIZE, dtype=torch.float64).long()
        rows = weight_rows(embedding, indices // width).float()
        sample = rows.gather(1, (indices % width)[:, None].to(rows.device))[:, 0].tolist()
        return cls(
            base_name(model),
            config.hidden_size,
            num_layers(model),
            config.vocab_size,
            tuple(float(f"{value:.6g}") for value in sample),
        )

    def difference(self, other: BaseModel) -> str | None:
        """Return how `other` differs, with both names; None if it is the same model."""
        for name in ("hidden_size", "num_layers", "vocab_size"):
            size, other_size = getattr(self, name), getattr(other, name)
            if size != other_size:
                return f"{self.name!r} with {name} {size}; {other.name!r} has {other_size}"
        pairs = zip(self.fingerprint, other.fingerprint, strict=True)
        scale = max(abs(value) for value in self.fingerprint)
        if any(abs(a - b) > FINGERPRINT_TOLERANCE * scale for a, b in pairs):
            return f"{self.name!r}; {other.name!r} has the same sizes but other weights"
        return None

    def check(self, model: PreTrainedModel) -> None:
        """Raise `AssistantError` if `model` is another model."""
        if (difference := self.difference(BaseModel.of(model))) is not None:
            raise AssistantError(
                f"the adapter was trained for {difference}: load the adapter's own base model, or "
                "train an adapter for this one"
            )


# Compared by identity: equality of tensors is not a bool.
@dataclass(frozen=True, eq=False)
class Adapter:
    """Data of a `SpecAdapter`; that class loads, saves and pushes it."""

    method: str
    base: BaseModel
    options: dict[str, Any]
    tensors: dict[str, Tensor]
    folder: Path | None = None
    repo_id: str | None = None
    bits: int = BITS[0]

    @property
    def record(self) -> AdapterMethod:
        """Its method; an unregistered one raises `AssistantError`."""
        if self.method not in _METHODS:
            raise AssistantError(
                f"adapter {str(self.folder)!r} is one of method {self.method!r}; known methods: "
                f"{', '.join(known_methods())}"
            )
        return _METHODS[self.method]

    @property
    def strategy(self) -> str:
        """Default strategy."""
        return self.record.strategy

    @property
    def largest(self) -> int:
        """Number of values in its largest tensor, an upper bound of the sizes in its options."""
        return max((tensor.numel() for tensor in self.tensors.values()), default=1)

    @property
    def own_folder(self) -> Path:
        """Folder that it was loaded from; `AssistantError` if that is the Hub's cache, or none."""
        if self.folder is None or self.repo_id is not None:
            raise AssistantError("the adapter has no folder of its own; save it to one first")
        return self.folder


def save_adapter(folder: str | os.PathLike[str], adapter: Adapter) -> None:
    """Write `adapter` to `folder`, each file in one rename, the config last.

    The folder is created if it is missing; a model card in it stays. Tensors keep their dtypes, or
    matrices are quantized to `adapter.bits`.
    """
    if adapter.bits not in BITS:
        raise OptionError(f"bits={adapter.bits!r}: weights are stored in 16, 8 or 4 bits")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in quantize(adapter.tensors, adapter.bits).items()
    }
    config = {
        "peft_type": PEFT_TYPE,
        "base_model_name_or_path": adapter.base.name,
        "method": adapter.method,
        "options": adapter.options,
        "base": asdict(adapter.base),
    }
    (folder / FOLDER).mkdir(exist_ok=True)
    for name, text in FILES.items():
        with atomic_write(folder / FOLDER / name) as part:
            part.write_text(text, encoding="utf-8")
    with atomic_write(folder / WEIGHTS_NAME) as part:
        save_file(tensors, part, metadata={"format": "pt"})
    with atomic_write(folder / CONFIG_NAME) as part:
        part.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def is_hub_id(name: str) -> bool:
    """Return True if `name` has the form "owner/name" of a Hub id."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return "/" in name


def local_name(model: PreTrainedModel) -> str:
    """Return the last part of the folder or Hub id of `model`, or its class name."""
    return os.path.basename(os.path.normpath(_source(model)))


def base_name(model: PreTrainedModel) -> str:
    """Return the Hub id of `model` if that is known, or its local name.

    The id is known for models that were loaded by id, from the Hub's cache, or from a folder that
    `hf_spec.common.small_models` converted.
    """
    source = _source(model)
    if not os.path.isdir(source):
        return source if is_hub_id(source) else local_name(model)
    folder = Path(source).absolute()
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith(CACHE_PREFIX):
        return repository.removeprefix(CACHE_PREFIX).replace("--", "/")
    return hub_id_of(folder) or local_name(model)


def source_path(model: PreTrainedModel) -> str:
    """Return the absolute folder or the Hub id that `model` was loaded from, or its class name."""
    source = _source(model)
    return os.path.realpath(source) if os.path.isdir(source) else source


def _source(model: PreTrainedModel) -> str:
    return str(model.config.name_or_path or type(model).__name__)
