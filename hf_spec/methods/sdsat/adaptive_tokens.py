"""Semantic adaptive tokens: what the target reads where a token is still unknown (SDSAT).

A chain of k of them after a text makes the target predict the k tokens after its next one (Liu et
al. 2024, arXiv 2403.18647). To the engine they are virtual tokens: negative ids, here -1 for
the first kind, -2 for the second and so on. *Identical* ones share one embedding and can be put in
a row at any length; *diverse* ones have one per place.

==============  ==================================================================  ==============
mode            what was trained                                                    target's output
==============  ==================================================================  ==============
``full``        the whole model, as in the paper; ids are rows of its vocabulary     another model's
``lora``        a LoRA at all positions (to be merged) and the embeddings            another model's
``embeddings``  the embeddings                                                      its own
``gated``       the embeddings, and a LoRA at adaptive positions only                its own
==============  ==================================================================  ==============

The last two and the LoRA are ours, not the paper's. Nothing looks back on an adaptive token but
those of its own chain, and their keys and values are dropped with the rejected drafts, so with the
last two modes the output of the base stays what it is.
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
from hf_spec.methods.sdsat.gated_lora import GatedLora, LoraWeights, Rows, merge_lora_inplace
from hf_spec.methods.sdsat.settings import MODES

METHOD = "sdsat"
# With mode "full" the target itself is trained, and there is no adapter.
ADAPTER_MODES = tuple(mode for mode in MODES if mode != "full")
EMBEDDINGS = "embeddings"
DOWN, UP = ".lora_A.weight", ".lora_B.weight"

# Chains are a few tokens long; what an adapter says of its own is held to this.
LONGEST_WINDOW = 1024

# Entries of a model's config: that of a fine-tuned model, and the LoRA that was merged into it.
CONFIG_ENTRY = "sdsat"
MERGED_ENTRY = "sdsat_merged_lora"


@dataclass(frozen=True)
class AdaptiveShape:
    """What kind of adaptive tokens there are.

    Attributes:
        mode: see the module.
        diverse: one embedding per place of a chain.
        window: L, the longest chain in training.
    """

    mode: str
    diverse: bool
    window: int


class AdaptiveTokens:
    """The adaptive tokens of one model; implements `VirtualTokens`.

    Args:
        shape: of which kind they are.
        embeddings: (1, hidden size), or (L, hidden size) if they are diverse; as `inputs_embeds`.
        lora: of the gated LoRA; none by default.
        everywhere: lets the LoRA act on all positions, which is for training only.
    """

    def __init__(
        self,
        shape: AdaptiveShape,
        embeddings: Tensor,
        lora: LoraWeights | None = None,
        everywhere: bool = False,
    ):
        self.shape = shape
        self.embeddings = embeddings
        self.lora = GatedLora(lora or {})
        self.everywhere = everywhere

    def chain(self, length: int) -> list[int]:
        """Virtual ids of a chain of adaptive tokens."""
        return [-1 - place if self.shape.diverse else -1 for place in range(length)]

    @property
    def longest_chain(self) -> int | None:
        """Most adaptive tokens in a row; None if there is no bound."""
        return self.embeddings.shape[0] if self.shape.diverse else None

    @contextmanager
    def active(self, model: PreTrainedModel) -> Iterator[None]:
        """Keep the LoRA's hooks on `model`; they do nothing outside of `embedded`."""
        with self.lora.installed(model):
            yield

    @property
    def acts_on_layers(self) -> bool:
        """Whether there is a LoRA."""
        return bool(self.lora.weights)

    def embed(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """See `VirtualTokens.embed`."""
        own = model.get_input_embeddings()(token_ids.clamp_min(0))
        kinds = (-1 - token_ids).clamp_min(0)
        new = self.embeddings[kinds.to(self.embeddings.device)].to(own.device, own.dtype)
        return torch.where((token_ids < 0).to(own.device)[..., None], new, own)

    def acting(self, token_ids: Tensor) -> AbstractContextManager[None]:
        """See `VirtualTokens.acting`."""
        chosen: Rows = slice(0, token_ids.numel())
        if not self.everywhere:
            rows = (token_ids < 0).flatten().nonzero()[:, 0]
            chosen = _as_rows(rows, rows.to(self.embeddings.device))
        return self.lora.acting_on(chosen, token_ids.numel())

    @contextmanager
    def embedded(self, model: PreTrainedModel, token_ids: Tensor) -> Iterator[Tensor]:
        """`embed` and `acting` for one forward outside of the engine; ids may lie anywhere."""
        table: Any = model.get_input_embeddings()
        with self.acting(token_ids.cpu()):
            yield self.embed(model, token_ids.to(execution_device(table)))

    def to_adapter(self, base: BaseModel, options: dict[str, Any]) -> SpecAdapter:
        """What was trained, in bfloat16, with the kind added to `options`."""
        tensors = {EMBEDDINGS: self.embeddings.detach().to(torch.bfloat16)}
        for name, (down, up) in self.lora.weights.items():
            tensors[name + DOWN] = down.detach().to(torch.bfloat16)
            tensors[name + UP] = up.detach().to(torch.bfloat16)
        return SpecAdapter(METHOD, base, {**asdict(self.shape), **options}, tensors)


def adaptive_tokens(
    model: PreTrainedModel, assistant: object
) -> tuple[AdaptiveTokens, dict[str, Any]]:
    """The adaptive tokens that `assistant=` stands for, and the options they were saved with.

    That is a folder, a Hub id or a `SpecAdapter`; None for a model that was fine-tuned with
    adaptive tokens of its own, as its config says.

    Raises:
        AssistantError: if there are none, or they belong to another model.
        UnsupportedError: if the model cannot be given embeddings.
    """
    if getattr(model.config.get_text_config(), "hidden_size_per_layer_input", 0):
        raise UnsupportedError(
            f"{type(model).__name__} gives every layer an embedding of its own for each token, "
            "which an adaptive token does not have; use another spec_strategy"
        )
    if assistant is None:
        return _own_tokens(model)
    adapter = _adapter_of(assistant)
    return from_adapter(model, adapter), adapter.options


def from_adapter(model: PreTrainedModel, adapter: SpecAdapter) -> AdaptiveTokens:
    """The adaptive tokens of `adapter`, on the devices and in the dtype of `model`.

    Raises:
        AssistantError: if the adapter belongs to another base, is damaged, or changes the model and
            has not been merged into it.
    """
    adapter.base.check(model)
    shape = _read_shape(adapter.options)
    found = {name: t for name, t in adapter.tensors.items() if name == EMBEDDINGS}
    table: Any = model.get_input_embeddings()
    wanted = (shape.window if shape.diverse else 1, table.weight.shape[1])
    check_tensors("the SDSAT adapter", found, {EMBEDDINGS: wanted})
    lora = _read_lora(adapter)
    if shape.mode == "embeddings" and lora:
        raise AssistantError("the SDSAT adapter is damaged: mode 'embeddings' with a LoRA")
    GatedLora(lora).check(model)
    if shape.mode == "lora":
        if getattr(model.config, MERGED_ENTRY, None) != _digest(lora):
            raise AssistantError(
                "the SDSAT adapter has a LoRA for all positions, which changes the model's output: "
                "merge it first, hf_spec.methods.sdsat.adaptive_tokens.merge_lora(model, adapter), "
                "or train one of mode 'gated'"
            )
        lora = {}
    if lora and tensor_parallel_size(model) > 1:
        raise UnsupportedError(
            "a gated LoRA adds to whole outputs of the target's layers, which tensor parallelism "
            "cuts up; use an SDSAT adapter of mode 'embeddings'"
        )
    layers = dict(model.named_modules())
    placed = {
        name: tuple(part.to(execution_device(layers[name]), model.dtype) for part in pair)
        for name, pair in lora.items()
    }
    embeddings = found[EMBEDDINGS].to(execution_device(table), model.dtype)
    return AdaptiveTokens(shape, embeddings, placed)  # type: ignore[arg-type]


def merge_lora(model: PreTrainedModel, assistant: object) -> PreTrainedModel:
    """Merge the LoRA of a mode "lora" adapter into `model`, in place, which changes its output.

    The model remembers it in its config; `assistant=` then takes the adapter. An adapter of another
    mode, or a second one, is an `AssistantError`.
    """
    adapter = _adapter_of(assistant)
    adapter.base.check(model)
    mode = _read_shape(adapter.options).mode
    if mode != "lora":
        raise AssistantError(f"an adapter of mode {mode!r} has nothing to merge; pass it as it is")
    if getattr(model.config, MERGED_ENTRY, None) is not None:
        raise AssistantError(f"{type(model).__name__} has an SDSAT LoRA merged into it already")
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
            f"assistant of type {type(assistant).__name__} is no SDSAT adapter; pass its folder or "
            "Hub id"
        )
    return load_adapter(assistant, METHOD)


def _own_tokens(model: PreTrainedModel) -> tuple[AdaptiveTokens, dict[str, Any]]:
    """The adaptive tokens of a fine-tuned model: rows of its vocabulary."""
    entry = getattr(model.config, CONFIG_ENTRY, None)
    if entry is None:
        raise AssistantError(
            "spec_strategy='sdsat' needs assistant=<folder or Hub id of an SDSAT adapter>, or a "
            f"model fine-tuned with adaptive tokens, whose config has {CONFIG_ENTRY!r}; "
            f"{type(model).__name__}'s has not"
        )
    table: Any = model.get_input_embeddings()
    try:
        ids = [int(token) for token in entry["token_ids"]]
        shape = AdaptiveShape("full", len(ids) > 1, int(entry["window"]))
    except (KeyError, TypeError, ValueError) as error:
        raise AssistantError(f"config.{CONFIG_ENTRY}={entry!r} is incomplete: {error!r}") from error
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
    if shape.mode not in ADAPTER_MODES or not isinstance(shape.diverse, bool):
        raise AssistantError(f"{what}'s options cannot be used: {shape}")
    whole_number(what, options, "window", 1, LONGEST_WINDOW)
    if options.get("num_adaptive") is not None:
        whole_number(what, options, "num_adaptive", 1, LONGEST_WINDOW)
    return shape


def _read_lora(adapter: SpecAdapter) -> dict[str, tuple[Tensor, Tensor]]:
    tensors = {name: t for name, t in adapter.tensors.items() if name != EMBEDDINGS}
    names = sorted({name.removesuffix(DOWN).removesuffix(UP) for name in tensors})
    whole = {part for name in names for part in (name + DOWN, name + UP)}
    if odd := sorted(whole ^ set(tensors)):
        raise AssistantError(f"the SDSAT adapter is damaged: {odd[0]} has no partner")
    return {name: (tensors[name + DOWN], tensors[name + UP]) for name in names}


def _digest(lora: LoraWeights) -> str:
    found = hashlib.sha256()
    for name in sorted(lora):
        for part in lora[name]:
            found.update(part.detach().float().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def _as_rows(rows: Tensor, places: Tensor) -> Rows:
    """A slice where the rows are consecutive, which spares a gather in every layer."""
    if not len(rows):
        return slice(0, 0)
    first, last = int(rows[0]), int(rows[-1])
    return slice(first, last + 1) if last - first + 1 == len(rows) else places


register_method(
    AdapterMethod(
        METHOD,
        strategy="sdsat",
        title="Adaptive tokens (SDSAT) for {}",
        build=lambda adapter, target: from_adapter(target, adapter),
    )
)
