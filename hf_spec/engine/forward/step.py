"""Attention step of one packed forward pass, in the form that each backend reads.

The step is described by its segments. SDPA reads groups of equal segments; the Triton and C++
kernels read flat tensors, a `RaggedLayout` and a slot mapping. A step that is replayed as a CUDA
graph exists in the flat form only, on its device.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from hf_spec_kernels import RaggedLayout
from hf_spec_kernels.ragged_tree_attention import implementation
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device.transfer import send
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.kernel_layout import (
    ragged_layout,
    segment_slot_mapping,
    tensors_of,
    with_tensors,
)
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.sdpa_attention import (
    SegmentGroup,
    WriteTarget,
    group_segments,
    write_target,
)

# Window of a layer that does not pass one: its model applies the window in the mask alone.
NOT_PASSED = -1


@dataclass(frozen=True)
class LayerTraits:
    """Attention settings of one layer, read from its config once per call.

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
        config: Any = getattr(module, "config", None)
        layer: Any = module
        kinds = getattr(config, "layer_types", None)
        kind = None if kinds is None else kinds[layer.layer_idx]
        window = getattr(config, "sliding_window", None)
        return cls(
            storage=_storage_layer(module),
            window=window if kind in (None, "sliding_attention") else None,
            chunk=config.attention_chunk_size if kind == "chunked_attention" else None,
            has_kind=kinds is not None,
        )

    def window_of(self, passed: int | None) -> int | None:
        """Return the window in tokens, given what the layer passes to its attention function."""
        return self.window if self.has_kind or passed == NOT_PASSED else passed


def _storage_layer(module: nn.Module) -> int:
    """Return the layer that stores a layer's keys and values: itself, or one that it shares."""
    layer: Any = module
    index: int = layer.layer_idx
    config = layer.config if getattr(layer, "is_kv_shared_layer", False) else None
    # Layers that share latents still compute keys and values of their own.
    if config is None or hasattr(layer, "expand_kv"):
        return index
    return storing_layers(config)[config.layer_types[index]]


def storing_layers(config: Any) -> dict[str, int]:
    """Return per kind of layer the last one with keys and values of its own; others may share."""
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    count = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: index for index, kind in enumerate(kinds[:count])}


@dataclass
class PackedStep:
    """One packed forward pass as the attention function reads it.

    Attributes:
        pool: keys and values of the rows.
        segments: the tokens of the pass; empty for a step built by `of_layout`.
        traits: traits of the model's layers by index, shared by all its steps.
        sees: (T, bytes) uint8, the `bits` of the layout if they were computed on the device.
        gate: (T,) bool, tokens to which a `LowRankChange` applies; None if there are none.
        written: layer index -> attention module of layers that have attended in this step.
        layer_calls: arguments of its compiled layers, cached by `CompiledLayer`.
    """

    pool: KVPool
    segments: Sequence[Segment]
    traits: dict[int, LayerTraits] = field(default_factory=dict)
    sees: Tensor | None = None
    gate: Tensor | None = None
    written: dict[int, nn.Module] = field(default_factory=dict)
    layer_calls: list[Any] = field(default_factory=list)
    _layouts: dict[torch.device, tuple[RaggedLayout, Tensor]] = field(default_factory=dict)
    _targets: dict[torch.device, WriteTarget] = field(default_factory=dict)

    @classmethod
    def of_layout(
        cls, pool: KVPool, layout: RaggedLayout, slot_mapping: Tensor, device: torch.device
    ) -> PackedStep:
        """Build a step from the kernels' tensors, which are on the device already."""
        return cls(pool, (), _layouts={device: (layout, slot_mapping)})

    def traits_of(self, module: nn.Module) -> LayerTraits:
        """Return the traits of an attention module; read them on a miss."""
        index: Any = module.layer_idx
        if index not in self.traits:
            self.traits[index] = LayerTraits.of(module)
        return self.traits[index]

    @cached_property
    def slot_mapping(self) -> Tensor:
        """(2, T) int32 on the host, slot and index in it where each token is stored."""
        return segment_slot_mapping(self.segments)

    @cached_property
    def groups(self) -> list[SegmentGroup]:
        """Segments that share an SDPA call."""
        return group_segments(self.segments)

    @cached_property
    def has_prompt(self) -> bool:
        """True if one of its segments is a prompt."""
        return any(segment.is_prompt for segment in self.segments)

    def target(self, device: torch.device) -> WriteTarget:
        """Return index expressions that SDPA steps store keys and values at, on a device."""
        if device not in self._targets:
            self._targets[device] = write_target(self.slot_mapping, device)
        return self._targets[device]

    @cached_property
    def on_host(self) -> tuple[RaggedLayout, Tensor]:
        """The kernels' layout and the slot mapping, on the host."""
        return ragged_layout(self.segments, self.sees), self.slot_mapping

    def layout(self, device: torch.device) -> tuple[RaggedLayout, Tensor]:
        """Return the kernels' layout and the slot mapping on a device, copied there once."""
        if device not in self._layouts:
            self.send(device)
        return self._layouts[device]

    def send(self, device: torch.device, *others: Tensor) -> list[Tensor]:
        """Copy the layout and other host tensors to a device in one transfer; return the others."""
        layout, slot_mapping = self.on_host
        if device.type == "cpu" and self.sees is None:
            self._layouts[device] = layout, slot_mapping
            return list(others)
        sent = send([*others, slot_mapping, *tensors_of(layout)], device)
        after = len(others)
        device_layout = with_tensors(layout, sent[after + 1 :])
        if self.sees is not None:
            device_layout = replace(device_layout, bits=self.sees)
        self._layouts[device] = device_layout, sent[after]
        return sent[:after]

    @cached_property
    def addresses(self) -> tuple[int, int] | None:
        """Addresses of layout and slot mapping for compiled layers; None if they do not run."""
        buffer = next(iter(self.pool.keys.values()))
        if self.has_prompt or implementation(buffer, buffer) != "cpp":
            return None
        layout, slot_mapping = self.layout(buffer.device)
        return ctypes.addressof(layout.addresses), slot_mapping.data_ptr()

    def check(self, model: PreTrainedModel, num_layers: int) -> None:
        """Raise `UnsupportedError` unless all layers of `model` ran `tree_attention`."""
        if len(self.written) != num_layers:
            raise UnsupportedError(
                f"{type(model).__name__} ran tree attention in {len(self.written)} of its "
                f"{num_layers} layers, so its tokens would be wrong; generate without spec_strategy"
            )


@dataclass(frozen=True)
class TracedStep:
    """Placeholder for a step while a layer is traced, where attention is a single operation.

    Attributes:
        attend: called with queries, keys, values, sinks, scaling, softcap and window like
            `tree_attention`; the window is `NOT_PASSED` if the layer does not pass one.
    """

    attend: Callable[..., Tensor]
