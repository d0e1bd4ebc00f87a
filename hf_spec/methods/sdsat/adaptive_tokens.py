"""Semantic adaptive tokens of one model, and their adapters (Liu and Zhu 2024, arXiv 2403.18647).

To the engine adaptive tokens are virtual tokens with negative ids: -1 for the first kind, -2 for
the second and so on. *Identical* ones share one embedding and form chains of any length; *diverse*
ones have one embedding per position of the chain (appendix B).

==============  =============================================================  ====================
mode            trained                                                        target's output
==============  =============================================================  ====================
``full``        the whole model, as in the paper; ids are vocabulary rows      changed
``lora``        a LoRA at all positions, to be merged, and the embeddings      changed
``embeddings``  the embeddings                                                 unchanged
``gated``       the embeddings, and a LoRA at adaptive positions only          unchanged
==============  =============================================================  ====================

All modes but ``full`` are ours. Only its own chain attends to an adaptive token, whose keys and
values are dropped with the rejected drafts; so the last two modes leave the output unchanged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import AdapterMethod, BaseModel, register_method
from hf_spec.adapters.folder import SpecAdapter, load_adapter
from hf_spec.adapters.reading import check_tensors, whole_number
from hf_spec.backend.device.distributed_checks import tensor_parallel_size
from hf_spec.backend.device.placement import execution_device
from hf_spec.common.errors import AssistantError, UnsupportedError
from hf_spec.methods.sdsat.gated_lora import GatedLora, LoraWeights, merge_lora_inplace
from hf_spec.methods.sdsat.settings import MODES

METHOD = "sdsat"
EMBEDDINGS = "embeddings"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

# Bound on the chain lengths of an adapter, which are a few tokens in practice.
MAX_WINDOW = 1024

# Config entries: of a fine-tuned model, and the digest of a LoRA that was merged into a model.
CONFIG_ENTRY = "sdsat"
MERGED_ENTRY = "sdsat_merged_lora"


@dataclass(frozen=True)
class AdaptiveShape:
    """Kind of adaptive tokens; `window` is L, the longest chain in training."""

    mode: str
    diverse: bool
    window: int


class AdaptiveTokens:
    """Adaptive tokens of one model; implements `VirtualTokens`.

    `embeddings` are (1, H), or (L, H) if diverse, in the scale of `inputs_embeds`.
    """

    def __init__(self, shape: AdaptiveShape, embeddings: Tensor, lora: LoraWeights | None = None):
        self.shape = shape
        self.embeddings = embeddings
        self.lora = GatedLora(lora or {})

    def chain(self, length: int) -> list[int]:
        """Return the virtual ids of a chain of adaptive tokens."""
        return [-1 - slot if self.shape.diverse else -1 for slot in range(length)]

    def active(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Install the LoRA's hooks on `model`; they act only inside `acting` or `embedded`."""
        return self.lora.installed(model)

    @property
    def acts_on_layers(self) -> bool:
        """True if there is a LoRA."""
        return bool(self.lora.weights)

    def embed(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """See `VirtualTokens.embed`."""
        standard = model.get_input_embeddings()(token_ids.clamp_min(0))
        kinds = (-1 - token_ids).clamp_min(0).to(self.embeddings.device)
        adaptive = self.embeddings[kinds].to(standard.device, standard.dtype)
        return torch.where((token_ids < 0).to(standard.device)[..., None], adaptive, standard)

    @contextmanager
    def acting(self, token_ids: Tensor) -> Iterator[Tensor]:
        """See `VirtualTokens.acting`."""
        gate = (token_ids < 0).flatten()
        # A LoRA of mode "lora" is here only in training; later it is merged.
        if self.shape.mode == "lora":
            gate = torch.ones_like(gate)
        with self.lora.acting_on(gate):
            yield gate

    @contextmanager
    def embedded(self, model: PreTrainedModel, token_ids: Tensor) -> Iterator[Tensor]:
        """Combine `embed` and `acting` for a forward pass outside the engine, with ids anywhere."""
        table: Any = model.get_input_embeddings()
        with self.acting(token_ids.cpu()):
            yield self.embed(model, token_ids.to(execution_device(table)))

    def to_adapter(self, base: BaseModel, options: dict[str, Any]) -> SpecAdapter:
        """Return the trained tensors in bfloat16, with the shape added to `options`."""
        tensors = {EMBEDDINGS: self.embeddings.detach().to(torch.bfloat16)}
        for name, (down, up) in self.lora.weights.items():
            tensors[name + DOWN] = down.detach().to(torch.bfloat16)
            tensors[name + UP] = up.detach().to(torch.bfloat16)
        return SpecAdapter(METHOD, base, {**asdict(self.shape), **options}, tensors)


def adaptive_tokens(
    model: PreTrainedModel, assistant: object
) -> tuple[AdaptiveTokens, dict[str, Any]]:
    """Return the adaptive tokens for `assistant=`, and the options they were saved with.

    None is for a model fine-tuned with adaptive tokens in its vocabulary (mode "full"). Raises
    `AssistantError` if there are none, or they belong to another model.
    """
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):
        raise UnsupportedError(
            f"{type(model).__name__} has an embedding per layer and token, which adaptive tokens "
            "do not have; use another spec_strategy"
        )
    if assistant is None:
        return _fine_tuned_tokens(model)
    adapter = _adapter_of(assistant)
    return from_adapter(model, adapter), adapter.options


def from_adapter(model: PreTrainedModel, adapter: SpecAdapter) -> AdaptiveTokens:
    """Return the adaptive tokens of `adapter`, on the devices and in the dtype of `model`."""
    adapter.base.check(model)
    shape = _read_shape(adapter.options)
    stored = {name: t for name, t in adapter.tensors.items() if name == EMBEDDINGS}
    table: Any = model.get_input_embeddings()
    expected = (shape.window if shape.diverse else 1, table.weight.shape[1])
    check_tensors("the SDSAT adapter", stored, {EMBEDDINGS: expected})
    lora = _read_lora(adapter)
    if shape.mode == "embeddings" and lora:
        raise AssistantError("the SDSAT adapter is damaged: mode 'embeddings' with a LoRA")
    GatedLora(lora).check(model)
    if shape.mode == "lora":
        if getattr(model.config, MERGED_ENTRY, None) != _digest(lora):
            raise AssistantError(
                "the SDSAT adapter has a LoRA at all positions, which changes the model's output; "
                "merge it first with "
                "hf_spec.methods.sdsat.adaptive_tokens.merge_lora(model, adapter), or train an "
                "adapter of mode 'gated'"
            )
        lora = {}
    if lora and tensor_parallel_size(model) > 1:
        raise UnsupportedError(
            "a gated LoRA needs the full outputs of the target's layers, which tensor parallelism "
            "shards; use an SDSAT adapter of mode 'embeddings'"
        )
    placed = {}
    for name, (down, up) in lora.items():
        device = execution_device(model.get_submodule(name))
        # Column by column in memory, see `LowRankChange`.
        columns = up.T.to(device, model.dtype).contiguous()
        placed[name] = down.to(device, model.dtype).contiguous(), columns.T
    embeddings = stored[EMBEDDINGS].to(execution_device(table), model.dtype)
    return AdaptiveTokens(shape, embeddings, placed)


def merge_lora(model: PreTrainedModel, assistant: object) -> PreTrainedModel:
    """Merge the LoRA of a mode "lora" adapter into `model` in place, which changes its output.

    A digest of the LoRA is stored in the model's config, so that `assistant=` accepts the adapter.
    """
    adapter = _adapter_of(assistant)
    adapter.base.check(model)
    mode = _read_shape(adapter.options).mode
    if mode != "lora":
        raise AssistantError(
            f"an adapter of mode {mode!r} has nothing to merge; pass it as assistant="
        )
    if getattr(model.config, MERGED_ENTRY, None) is not None:
        raise AssistantError(
            f"{type(model).__name__} has a merged SDSAT LoRA already; load the base model again"
        )
    lora = _read_lora(adapter)
    GatedLora(lora).check(model)
    merge_lora_inplace(model, lora)
    setattr(model.config, MERGED_ENTRY, _digest(lora))
    return model


def _adapter_of(assistant: object) -> SpecAdapter:
    if isinstance(assistant, SpecAdapter):
        return assistant
    if not isinstance(assistant, (str, os.PathLike)):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is not an SDSAT adapter; pass the "
            "folder or Hub id of one"
        )
    return load_adapter(assistant, METHOD)


def _fine_tuned_tokens(model: PreTrainedModel) -> tuple[AdaptiveTokens, dict[str, Any]]:
    entry = getattr(model.config, CONFIG_ENTRY, None)
    if entry is None:
        raise AssistantError(
            "spec_strategy='sdsat' needs assistant=<folder or Hub id of an SDSAT adapter>, or a "
            f"model fine-tuned with adaptive tokens, whose config has {CONFIG_ENTRY!r}; the config "
            f"of {type(model).__name__} has no such entry"
        )
    table: Any = model.get_input_embeddings()
    try:
        ids = [int(token) for token in entry["token_ids"]]
        shape = AdaptiveShape("full", len(ids) > 1, int(entry["window"]))
    except (KeyError, TypeError, ValueError) as error:
        raise AssistantError(
            f"config.{CONFIG_ENTRY}={entry!r} is incomplete: {error!r}; set token_ids and window"
        ) from error
    if not ids or not all(0 <= token < table.weight.shape[0] for token in ids):
        raise AssistantError(
            f"config.{CONFIG_ENTRY} names the tokens {ids}; the model has {table.weight.shape[0]}"
        )
    with torch.no_grad():
        embeddings = table(torch.tensor(ids, device=execution_device(table)))
    return AdaptiveTokens(shape, embeddings), entry


def _read_shape(options: dict[str, Any]) -> AdaptiveShape:
    what = "the SDSAT adapter"
    try:
        shape = AdaptiveShape(options["mode"], options["diverse"], options["window"])
    except KeyError as error:
        raise AssistantError(f"{what}'s options lack {error}") from error
    # Mode "full" trains the target itself and has no adapter.
    if shape.mode not in MODES or shape.mode == "full" or not isinstance(shape.diverse, bool):
        raise AssistantError(f"{what}'s options cannot be used: {shape}")
    whole_number(what, options, "window", 1, MAX_WINDOW)
    if options.get("num_adaptive") is not None:
        whole_number(what, options, "num_adaptive", 1, MAX_WINDOW)
    return shape


def _read_lora(adapter: SpecAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = {name: t for name, t in adapter.tensors.items() if name != EMBEDDINGS}
    names = sorted({name.removesuffix(DOWN).removesuffix(UP) for name in tensors})
    pairs = {part for name in names for part in (name + DOWN, name + UP)}
    if unpaired := sorted(pairs ^ set(tensors)):
        raise AssistantError(f"the SDSAT adapter is damaged: {unpaired[0]} has no partner")
    return {name: (tensors[name + DOWN], tensors[name + UP]) for name in names}


def _digest(lora: LoraWeights) -> str:
    digest = hashlib.sha256()
    for part in [part for name in sorted(lora) for part in lora[name]]:
        digest.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()[:16]


register_method(
    AdapterMethod(
        METHOD,
        strategy="sdsat",
        title="Adaptive tokens (SDSAT) for {}",
        build=lambda adapter, target: from_adapter(target, adapter),
    )
)
