"""Shapes of packed steps for CUDA graphs: inputs at fixed addresses, padded to a few sizes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from hf_spec_kernels import RaggedLayout
from torch import Tensor

from hf_spec.backend.device.capture import recording
from hf_spec.backend.device.transfer import PinnedBuffer
from hf_spec.engine.forward.kernel_layout import (
    Sizes,
    padded,
    round_up,
    tensors_of,
    with_tensors,
    write_padded,
)
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.step import PackedStep

# (inputs on the device, (T, ...) each; their step) -> outputs, (T, ...) each.
Compute = Callable[[list[Tensor], PackedStep], list[Tensor]]

# Largest ratio of the tokens of a shape to those of a step that runs in it.
MAX_GROWTH = 2


class _Variant(threading.local):
    key: Hashable = None


_variant = _Variant()


@contextmanager
def step_variant(key: Hashable) -> Iterator[None]:
    """Separate this thread's steps inside the block, which compute something else, from others."""
    before, _variant.key = _variant.key, (_variant.key, key)
    try:
        yield
    finally:
        _variant.key = before


@dataclass
class Inputs:
    """Inputs of a step.

    Attributes:
        tensors: inputs of the model, on the host or the device.
        layout, places: layout and slot mapping of the step, on the host.
        sees: `bits` of the layout if they were computed on the device.
    """

    tensors: Sequence[Tensor]
    layout: RaggedLayout
    places: Tensor
    sees: Tensor | None = None

    @cached_property
    def kinds(self) -> tuple[tuple[object, ...], ...]:
        """Key of the computation and of the tensors, their numbers of rows excluded."""
        return ((_variant.key,), *((t.device, t.dtype, t.shape[1:]) for t in self.tensors))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each tensor."""
        return tuple(map(len, self.tensors))

    @property
    def hosted(self) -> list[Tensor]:
        """The `tensors` that are on the host."""
        return [tensor for tensor in self.tensors if tensor.device.type == "cpu"]


class Bucket(NamedTuple):
    """Sizes that a graph fixes: those of its layout, rows of its tensors, and their kinds."""

    sizes: Sizes
    rows: tuple[int, ...]
    kinds: tuple[tuple[object, ...], ...]

    @classmethod
    def of(cls, inputs: Inputs) -> Bucket:
        """Return the bucket of a step."""
        return cls(Sizes.of(inputs.layout), tuple(map(round_up, inputs.rows)), inputs.kinds)

    def holds(self, inputs: Inputs) -> bool:
        """Return True if a step fits, without much more work."""
        return (
            self.kinds == inputs.kinds
            and all(rows >= needed for rows, needed in zip(self.rows, inputs.rows, strict=True))
            and self.sizes.tokens <= MAX_GROWTH * round_up(inputs.rows[0])
            and self.sizes.hold(inputs.layout)
        )


class Shape:
    """Fixed buffers of one shape of steps, and its graph once it is captured."""

    def __init__(self, bucket: Bucket, inputs: Inputs, capacity: int, device: torch.device):
        self.uses = self.nbytes = 0
        self.bucket = bucket
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Tensor] = []
        self._device = device
        kinds = [(rows, t) for rows, t in zip(bucket.rows, inputs.tensors, strict=True)]
        wide = padded(inputs.layout, bucket.sizes, capacity)
        hosted = [t.new_zeros(rows, *t.shape[1:]) for rows, t in kinds if t.device.type == "cpu"]
        places = inputs.places.new_zeros(2, bucket.sizes.tokens)
        like = [*hosted, places, *tensors_of(wide)]
        self._buffer = PinnedBuffer(like, device)
        # Steps are assembled here: slices of arrays are several times as fast as those of tensors.
        self._staged = PinnedBuffer(like, torch.device("cpu"))
        self._arrays = [tensor.numpy() for tensor in self._staged.tensors]
        fixed = iter(self._buffer.tensors)
        self.inputs = [
            next(fixed) if t.device.type == "cpu" else t.new_zeros(rows, *t.shape[1:])
            for rows, t in kinds
        ]
        self._places = next(fixed)
        self._layout = with_tensors(wide, list(fixed))

    def fill(self, inputs: Inputs) -> None:
        """Copy the inputs of a step to the fixed addresses, those on the host in one transfer."""
        hosted = inputs.hosted
        for array, tensor in zip(self._arrays, hosted, strict=False):
            array[: len(tensor)] = tensor.numpy()
            array[len(tensor) :] = 0
        places, *layout = self._arrays[len(hosted) :]
        count = inputs.places.shape[1]
        places[:, :count] = inputs.places.numpy()
        places[:, count:] = -1
        write_padded(inputs.layout, layout, self.bucket.sizes.tokens)
        self._buffer.copy(self._staged)
        for buffer, tensor in zip(self.inputs, inputs.tensors, strict=True):
            if tensor.device.type != "cpu":
                buffer[: len(tensor)] = tensor
        if (sees := inputs.sees) is not None:
            self._layout.bits[: sees.shape[0], : sees.shape[1]] = sees

    def step(self, pool: KVPool) -> PackedStep:
        """Return the step as the attention function reads it."""
        return PackedStep.of_layout(pool, self._layout, self._places, self._device)

    def record(self, compute: Compute, pool: KVPool, memory: Any) -> None:
        """Capture the launches of `compute` without running them."""
        with recording(self._device, memory) as graph:
            self.outputs = compute(self.inputs, self.step(pool))
        self.graph = graph
