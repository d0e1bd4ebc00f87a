"""Attention of packed token trees, registered with transformers under the name `hf_spec`.

The model runs on one packed sequence (1, T) that holds the new tokens of every row. Each layer
hands its queries, keys and values to `tree_attention`, which stores the keys and values in the
rows' slots and lets every token attend to its own row: the committed part, then its ancestors.

A model finds its attention function by the name in its config. The config is not changed for that,
since other threads may read it, and so may a logits processor that calls the model: inside
`PackedAttention.chosen` it answers with our name, in that thread and to that model only.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from hf_spec_kernels import RaggedLayout, Scoring, kv_write, ragged_tree_attention
from hf_spec_kernels.ragged_tree_attention import implementation
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask

from hf_spec.backend.device.transfer import send
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.kernel_layout import (
    ragged_layout,
    tensors_of,
    with_tensors,
    write_places,
)
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.sdpa_attention import SegmentGroup, attend, store, together

NAME = "hf_spec"

# Attention interface or not, these take the rectangular path: layers of the first two drop the
# keyword arguments that attention functions need, DiffLlama attends twice per layer, with two
# values, only the images of GIT go through the interface, the layers of Zamba share an attention
# that does not know in which of them it is, and those of Whisper attend to an encoder as well.
RECTANGULAR_ONLY = {"nemotron", "stablelm", "diffllama", "git", "whisper", "zamba", "zamba2"}


# Passed as a window by layers whose model applies it in the mask alone.
NOT_SAID = -1


@dataclass(frozen=True)
class LayerTraits:
    """Attention of one layer by its config, read once per call because reading takes long.

    Attributes:
        storage: index of the layer that stores its keys and values.
        window: sliding window in tokens by the config; None for none.
        chunk: length in tokens of the chunks within which it attends; None for none.
        has_kind: True if the config lists the kind of every layer. Masks of transformers then
            follow the config, also where a layer passes the window that it was created with.
    """

    storage: int
    window: int | None
    chunk: int | None
    has_kind: bool

    @classmethod
    def of(cls, module: nn.Module) -> LayerTraits:
        """Read the traits of an attention module."""
        has_kind = _kinds(module) is not None
        return cls(_storage_layer(module), _mask_window(module), _chunk(module), has_kind)

    def window_of(self, passed: int | None) -> int | None:
        """Return the window in tokens, given what the layer passes to its attention function."""
        return self.window if self.has_kind or passed == NOT_SAID else passed


@dataclass
class PackedStep:
    """Everything the attention function needs to know about one packed forward.

    Attributes:
        pool: where keys and values live.
        writes: per row (slot, start, end, places): packed tokens [start, end) go to `places`.
        segments: what each stretch of tokens attends to; none where the step is told by its layout
            alone (see `of_layout`).
        traits: what steps of the same model have found its layers to be, by index.
        sees: (T, bytes) uint8 on the device, the bits of the layout where only that knows them.
        written: layers that have stored their keys and values in this step, and their attention.
        layer_calls: arguments of its compiled layers, cached by `CompiledLayer`.
    """

    pool: KVPool
    writes: Sequence[tuple[int, int, int, slice | Tensor]]
    segments: Sequence[Segment]
    traits: dict[int, LayerTraits] = field(default_factory=dict)
    sees: Tensor | None = None
    written: dict[int, nn.Module] = field(default_factory=dict)
    layer_calls: list[Any] = field(default_factory=list)
    _layouts: dict[torch.device, tuple[RaggedLayout, Tensor]] = field(default_factory=dict)

    @classmethod
    def of_layout(
        cls, pool: KVPool, layout: RaggedLayout, places: Tensor, device: torch.device
    ) -> PackedStep:
        """A step that is on its device already, and in no other form than the kernels'."""
        return cls(pool, (), (), _layouts={device: (layout, places)})

    def traits_of(self, module: nn.Module) -> LayerTraits:
        """Those of an attention module, asked for once."""
        index: Any = module.layer_idx
        if index not in self.traits:
            self.traits[index] = LayerTraits.of(module)
        return self.traits[index]

    @cached_property
    def on_host(self) -> tuple[RaggedLayout, Tensor]:
        """What the kernels read: the layout, and (2, T) where each token is stored."""
        return ragged_layout(self.segments, self.sees), self.where

    @cached_property
    def where(self) -> Tensor:
        """(2, T) on the host where each token is stored."""
        return write_places(self.writes, self.segments[-1].end)

    @cached_property
    def groups(self) -> list[SegmentGroup]:
        """What attends in one call where no kernel serves the step."""
        return together(self.segments)

    def layout(self, device: torch.device) -> tuple[RaggedLayout, Tensor]:
        """The same on a device."""
        if device not in self._layouts:
            self.send(device)
        return self._layouts[device]

    def send(self, device: torch.device, *others: Tensor) -> list[Tensor]:
        """Put the layout, and other tensors of the host, which it returns, on a device at once."""
        layout, places = self.on_host
        sent = send([*others, places, *tensors_of(layout)], device)
        after = len(others)
        there = with_tensors(layout, sent[after + 1 :])
        if self.sees is not None:
            there = replace(there, bits=self.sees)
        self._layouts[device] = there, sent[after]
        return sent[:after]

    @cached_property
    def addresses(self) -> tuple[int, int] | None:
        """Where the C++ kernels find the layout and the places on a CPU; None if others serve."""
        buffer = next(iter(self.pool.keys.values()))
        if implementation(buffer, buffer) != "cpp":
            return None
        layout, places = self.layout(buffer.device)
        return ctypes.addressof(layout.addresses), places.data_ptr()

    def check(self, model: PreTrainedModel, num_layers: int) -> None:
        """Refuse a model that did not run its tree through `tree_attention` in all its layers."""
        if len(self.written) != num_layers:
            raise UnsupportedError(
                f"{type(model).__name__} ran tree attention in {len(self.written)} of its "
                f"{num_layers} layers, so its tokens would be wrong; generate without spec_strategy"
            )


@dataclass(frozen=True)
class TracedStep:
    """Stands for a step while a layer is traced, where attention is an operation of its own.

    `attend` is called with queries, keys, values, sinks, scaling, softcap and window as
    `tree_attention` is, the window `NOT_SAID` where the layer does not name it.
    """

    attend: Callable[..., Tensor]


def tree_attention(  # noqa: PLR0913 - the signature that transformers calls
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    spec_step: PackedStep | TracedStep | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Store the new keys and values, then attend: by kernels, or by `attend` where none serves.

    The signature is what transformers calls, with (1, H, T, D) queries and (1, H_kv, T, D) keys and
    values, rotated already. What is visible comes from `spec_step`, not from the mask. `softcap`
    squashes scores by tanh; `s_aux` are (H,) attention sinks, a logit per head that takes
    probability and gives nothing; `sliding_window` says how far back a token sees, itself included.

    Returns:
        (1, T, H, D) and None (no weights).

    Raises:
        UnsupportedError: if it is called without a step, or a second time by a layer in one step.
    """
    if spec_step is None:
        raise UnsupportedError(
            f"{type(module).__name__} asked for the attention {NAME!r} without a draft tree: the "
            "model does not hand it on to its layers, or was set to it by hand; generate without "
            "spec_strategy, or choose another attn_implementation"
        )
    if isinstance(spec_step, TracedStep):
        window = kwargs.get("sliding_window", NOT_SAID)
        return spec_step.attend(query, key, value, s_aux, scaling, softcap, window), None
    layer_index: Any = module.layer_idx
    if layer_index in spec_step.written:
        raise UnsupportedError(
            f"{type(module).__name__} {layer_index} attends twice in one forward, so a tree would "
            "overwrite its own keys and values; generate without spec_strategy"
        )
    spec_step.written[layer_index] = module
    traits = spec_step.traits_of(module)
    keys, values = spec_step.pool.layer(traits.storage, key, value)
    form = _form(spec_step, query, values)
    if traits.storage == layer_index:
        _store(spec_step, form, (key, value), (keys, values))
    window = traits.window_of(kwargs.get("sliding_window", NOT_SAID))
    sinks = None if s_aux is None else s_aux.float()
    scoring = Scoring(scaling, window, softcap, sinks=sinks, chunk=traits.chunk)
    return _attend(spec_step, form, query, (keys, values), scoring), None


def attend_stored(
    step: PackedStep, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
) -> Tensor:
    """Attention of (1, H, T, D) queries to what a step lets them see of a pool's buffers.

    Nothing is stored. `keys` and `values` are those of one layer, see `KVPool`.

    Returns:
        (1, T, H, D).
    """
    return _attend(step, _form(step, query, values), query, (keys, values), scoring)


def _attend(
    step: PackedStep,
    form: tuple[str, bool],
    query: Tensor,
    buffers: tuple[Tensor, Tensor],
    scoring: Scoring,
) -> Tensor:
    (impl, flat), (keys, values) = form, buffers
    if flat:
        layout, _ = step.layout(query.device)
        rows = query[0].transpose(0, 1)
        return ragged_tree_attention(rows, keys, values, layout, scoring, impl)[None]
    return attend(step.groups, query, keys, values, scoring)


def _form(step: PackedStep, query: Tensor, values: Tensor) -> tuple[str, bool]:
    """Which implementation of the kernels, and whether a step is told to it by its layout."""
    impl = implementation(query, values)
    return impl, impl != "torch" or not step.segments or step.sees is not None


def _store(
    step: PackedStep,
    form: tuple[str, bool],
    new: tuple[Tensor, Tensor],
    buffers: tuple[Tensor, Tensor],
) -> None:
    """Write (1, H_kv, T, D) keys and values into the buffers of their layer."""
    (key, value), (keys, values) = new, buffers
    if form[1]:
        _, where = step.layout(key.device)
        by_token = key[0].transpose(0, 1), value[0].transpose(0, 1)
        kv_write(*by_token, keys, values, where, form[0])
        return
    for states, buffer in ((key, keys), (value, values)):
        store(step.writes, step.where, states, buffer)


def _storage_layer(module: nn.Module) -> int:
    """Which layer has the keys and values of a layer: itself, or one that shares them with it."""
    layer: Any = module
    index: int = layer.layer_idx
    config = layer.config if getattr(layer, "is_kv_shared_layer", False) else None
    # Of shared latents every layer makes keys and values of its own.
    if config is None or hasattr(layer, "expand_kv"):
        return index
    return storing_layers(config)[config.layer_types[index]]


def storing_layers(config: Any) -> dict[str, int]:
    """The last layer of every kind that has keys and values of its own; others may share them."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: index for index, kind in enumerate(kinds[:own])}


def _chunk(module: nn.Module) -> int | None:
    """Length of the chunks within which a layer attends; None where there are none."""
    kinds = _kinds(module)
    if kinds is None or kinds[module.layer_idx] != "chunked_attention":
        return None
    config: Any = module.config
    return config.attention_chunk_size


def _kinds(module: nn.Module) -> Any:
    """Return the kinds of all layers of the model that an attention module belongs to."""
    return getattr(getattr(module, "config", None), "layer_types", None)


def _mask_window(module: nn.Module) -> int | None:
    """Return the window in tokens that the config sets for a layer."""
    kinds = _kinds(module)
    if kinds is not None and kinds[module.layer_idx] != "sliding_attention":
        return None
    return getattr(getattr(module, "config", None), "sliding_window", None)


def register() -> None:
    """Make `hf_spec` known to transformers; models take it inside `PackedAttention.chosen`."""
    AttentionInterface.register(NAME, tree_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def unregister() -> None:
    """Give the config classes back as they were found."""
    with _lock:
        while _answering:
            owner, plain = _answering.popitem()
            owner._attn_implementation = plain  # type: ignore[assignment]


def takes_packed(model: PreTrainedModel) -> bool:
    """Whether `model` can run packed trees; the others take the rectangular path."""
    taken = model._can_set_attn_implementation()
    return bool(taken) and model.config.model_type not in RECTANGULAR_ONLY


class _Chosen(threading.local):
    """Ids of the configs that answer with our name in this thread."""

    configs: frozenset[int] = frozenset()


_chosen = _Chosen()
_lock = threading.Lock()
# Config classes that ask `_chosen` first, and the property that each had.
_answering: dict[type[PreTrainedConfig], property] = {}


class PackedAttention:
    """Lets one model that `takes_packed` attend by `tree_attention`.

    `traits` are for its steps, see `PackedStep`.
    """

    def __init__(self, model: PreTrainedModel):
        self.traits: dict[int, LayerTraits] = {}
        # Layers borrowed from another model look the name up in that model's config.
        configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
        self._configs = [c for c in configs.values() if isinstance(c, PreTrainedConfig)]
        self._ids = frozenset(map(id, self._configs))
        for owner in {_owner(type(config)) for config in self._configs}:
            _let_answer(owner)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """What this thread runs of the model attends by `tree_attention`."""
        before, _chosen.configs = _chosen.configs, self._ids
        try:
            yield
        finally:
            _chosen.configs = before


def _owner(config: type[PreTrainedConfig]) -> type[PreTrainedConfig]:
    """The class that says how `config` answers; models may have one of their own."""
    return next(cls for cls in config.__mro__ if "_attn_implementation" in vars(cls))


def _let_answer(owner: type[PreTrainedConfig]) -> None:
    with _lock:
        if owner in _answering:
            return
        plain: Any = vars(owner)["_attn_implementation"]

        def answer(config: PreTrainedConfig) -> str | None:
            return NAME if id(config) in _chosen.configs else plain.fget(config)

        _answering[owner] = plain
        owner._attn_implementation = property(answer, plain.fset)  # type: ignore[assignment]
