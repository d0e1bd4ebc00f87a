"""Shapes of packed steps: inputs that stand where a graph looks for them, padded to a few sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hf_spec_kernels import RaggedLayout
from torch import Tensor
from torch.nn import functional as F

from hf_spec.backend.device.capture import recording
from hf_spec.backend.device.transfer import PinnedBuffer
from hf_spec.engine.forward.kernel_layout import (
    Sizes,
    padded,
    round_up,
    tensors_of,
    with_tensors,
)
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.step import PackedStep

# Inputs on the device, (T, ...) each, and the step they belong to -> outputs, (T, ...) each.
Compute = Callable[[list[Tensor], PackedStep], list[Tensor]]

# How much larger a shape may be than the step that it takes in.
MAX_GROWTH = 2


class _Variant(threading.local):
    """Kind of step that this thread computes, for models with several kinds."""

    key: Hashable = None


_variant = _Variant()


@contextmanager
def step_variant(key: Hashable) -> Iterator[None]:
    """Give steps of this thread inside the block shapes of their own.

    For a model that computes something else there with inputs of the same sizes.
    """
    before, _variant.key = _variant.key, (_variant.key, key)
    try:
        yield
    finally:
        _variant.key = before


@dataclass
class Inputs:
    """What a step is told: tensors on the host or the device; places and layout on the host.

    `sees` are the bits of the layout where these are on the device.
    """

    tensors: Sequence[Tensor]
    layout: RaggedLayout
    places: Tensor
    sees: Tensor | None = None

    @property
    def kinds(self) -> list[tuple[object, ...]]:
        """All but the rows of the tensors, and what is computed from them."""
        return [(_variant.key,), *((t.device, t.dtype, t.shape[1:]) for t in self.tensors)]

    def hosted(self, bucket: Bucket, capacity: int) -> list[Tensor]:
        """What is on the host, padded: the tensors among them, the places, and the layout's."""
        tensors = [
            _lengthened(tensor, rows)
            for tensor, rows in zip(self.tensors, bucket.rows, strict=True)
            if tensor.device.type == "cpu"
        ]
        added = bucket.sizes.tokens - self.places.shape[1]
        layout = padded(self.layout, bucket.sizes, capacity)
        return [*tensors, F.pad(self.places, (0, added), value=-1), *tensors_of(layout)]


class Bucket(NamedTuple):
    """All that a graph fixes: the sizes of its layout; rows of its tensors, and their kinds."""

    sizes: Sizes
    rows: tuple[int, ...]
    kinds: tuple[tuple[object, ...], ...]

    @classmethod
    def of(cls, inputs: Inputs) -> Bucket:
        """The one that is made for a step like this."""
        rows = tuple(round_up(len(tensor)) for tensor in inputs.tensors)
        return cls(Sizes.of(inputs.layout), rows, tuple(inputs.kinds))

    def holds(self, inputs: Inputs) -> bool:
        """Whether a step can run in this shape, and without much more work."""
        least = tuple(len(tensor) for tensor in inputs.tensors)
        return (
            self.kinds == tuple(inputs.kinds)
            and self.sizes.tokens <= MAX_GROWTH * round_up(least[0])
            and self.sizes.hold(inputs.layout)
            and all(mine >= theirs for mine, theirs in zip(self.rows, least, strict=True))
        )


class Shape:
    """One shape of steps: where its inputs stand, its graph, and where its outputs are."""

    def __init__(self, bucket: Bucket, inputs: Inputs, capacity: int, device: torch.device):
        self.uses = self.nbytes = 0
        self.bucket = bucket
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Tensor] = []
        self._device = device
        self._capacity = capacity
        self._buffer = PinnedBuffer(inputs.hosted(bucket, capacity), device)
        standing = iter(self._buffer.tensors)
        self.inputs = [
            next(standing) if t.device.type == "cpu" else t.new_zeros(rows, *t.shape[1:])
            for t, rows in zip(inputs.tensors, bucket.rows, strict=True)
        ]
        self._places = next(standing)
        wide = padded(inputs.layout, bucket.sizes, capacity)
        self._layout = with_tensors(wide, list(standing))

    def fill(self, inputs: Inputs) -> None:
        """Put the inputs of a step where they are looked for."""
        self._buffer.fill(inputs.hosted(self.bucket, self._capacity))
        for mine, tensor in zip(self.inputs, inputs.tensors, strict=True):
            if tensor.device.type != "cpu":
                mine[: len(tensor)] = tensor
        if (sees := inputs.sees) is not None:
            self._layout.bits[: sees.shape[0], : sees.shape[1]] = sees

    def step(self, pool: KVPool) -> PackedStep:
        """The step as the attention function takes it."""
        return PackedStep.of_layout(pool, self._layout, self._places, self._device)

    def record(self, compute: Compute, pool: KVPool, memory: Any) -> None:
        """Record what `compute` launches; nothing runs yet."""
        with recording(self._device, memory) as graph:
            self.outputs = compute(self.inputs, self.step(pool))
        self.graph = graph


def _lengthened(tensor: Tensor, rows: int) -> Tensor:
    return torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
