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
from torch.nn import functional as F

from hf_spec.backend.device.capture import recording
from hf_spec.backend.device.transfer import TensorBuffer
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
# Room of the first step of a program, which runs what the round before has accepted: few graphs are
# worth more than a few tokens of padding in one of the steps.
FIRST_TOKENS = 8


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
        layout, slot_mapping: those of the step, on the host.
        sees: `bits` of the layout if they were computed on the device.
    """

    tensors: Sequence[Tensor]
    layout: RaggedLayout
    slot_mapping: Tensor
    sees: Tensor | None = None

    @cached_property
    def kinds(self) -> tuple[tuple[object, ...], ...]:
        """Key of the computation and of the tensors, their numbers of rows excluded."""
        return ((_variant.key,), *((t.device, t.dtype, t.shape[1:]) for t in self.tensors))

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """Number of rows of each tensor."""
        return tuple(map(len, self.tensors))

    def hosted(self, bucket: StepBucket, capacity: int) -> list[Tensor]:
        """Return all host tensors, padded: those of `tensors`, the slot mapping, the layout."""
        tensors = [
            torch.cat([tensor, tensor.new_zeros(rows - len(tensor), *tensor.shape[1:])])
            for tensor, rows in zip(self.tensors, bucket.rows, strict=True)
            if tensor.device.type == "cpu"
        ]
        added = bucket.sizes.tokens - self.slot_mapping.shape[1]
        layout = padded(self.layout, bucket.sizes, capacity)
        return [*tensors, F.pad(self.slot_mapping, (0, added), value=-1), *tensors_of(layout)]

    def write(self, arrays: Iterator[Any], bucket: StepBucket) -> None:
        """Write what `hosted` returns to NumPy arrays."""
        for tensor in self.tensors:
            if tensor.device.type == "cpu":
                array = next(arrays)
                array[: len(tensor)] = tensor.numpy()
                array[len(tensor) :] = 0
        slot_mapping, count = next(arrays), self.slot_mapping.shape[1]
        slot_mapping[:, :count] = self.slot_mapping.numpy()
        slot_mapping[:, count:] = -1
        layout = [next(arrays) for _ in tensors_of(self.layout)]
        write_padded(self.layout, layout, bucket.sizes.tokens)


@dataclass
class GraphInputs:
    """Inputs of a graph: those of one step, or of all steps of a `Program`.

    Attributes:
        steps: inputs of the steps. Of later steps, tensors on the device are placeholders for what
            the program computes.
        key, constants, noise: see `Program`.
    """

    steps: Sequence[Inputs]
    key: Hashable = None
    constants: Sequence[Tensor] = ()
    noise: tuple[int, ...] | None = None

    def hosted(self, bucket: Bucket, capacity: int) -> list[Tensor]:
        """Return all host tensors: the constants, and those of each step, padded."""
        pairs = zip(self.steps, bucket.steps, strict=True)
        return [*self.constants, *(t for step, b in pairs for t in step.hosted(b, capacity))]

    def write(self, arrays: Iterator[Any], bucket: Bucket) -> None:
        """Write what `hosted` returns to NumPy arrays."""
        for constant in self.constants:
            next(arrays)[...] = constant.numpy()
        for step, part in zip(self.steps, bucket.steps, strict=True):
            step.write(arrays, part)


class StepBucket(NamedTuple):
    """Sizes that a graph fixes: those of a step's layout, rows of its tensors, and their kinds."""

    sizes: Sizes
    rows: tuple[int, ...]
    kinds: tuple[tuple[object, ...], ...]

    @classmethod
    def of(cls, inputs: Inputs, smallest: int = 1) -> StepBucket:
        """Return the bucket of a step, with room for the `smallest` number of tokens or more."""
        rows = tuple(round_up(max(count, smallest)) for count in inputs.rows)
        sizes = Sizes.of(inputs.layout, smallest, min(smallest, 2))
        return cls(sizes, rows, inputs.kinds)

    def holds(self, inputs: Inputs, smallest: int = 1) -> bool:
        """Return True if a step fits, without much more work."""
        return (
            self.kinds == inputs.kinds
            and all(rows >= needed for rows, needed in zip(self.rows, inputs.rows, strict=True))
            and self.sizes.tokens <= MAX_GROWTH * round_up(max(inputs.rows[0], smallest))
            and self.sizes.hold(inputs.layout)
        )


class Bucket(NamedTuple):
    """Key of a graph: its program, None for a single step, and the buckets of its steps."""

    program: Hashable
    steps: tuple[StepBucket, ...]

    @classmethod
    def of(cls, inputs: GraphInputs) -> Bucket:
        """Return the bucket of a graph's inputs."""
        steps = zip(inputs.steps, _smallest(inputs), strict=True)
        return cls(_program_of(inputs), tuple(StepBucket.of(*step) for step in steps))

    def holds(self, inputs: GraphInputs) -> bool:
        """Return True if all steps fit."""
        return (
            self.program == _program_of(inputs)
            and len(self.steps) == len(inputs.steps)
            and all(map(StepBucket.holds, self.steps, inputs.steps, _smallest(inputs)))
        )


def _program_of(inputs: GraphInputs) -> Hashable:
    if inputs.key is None:
        return None
    kinds = tuple((tensor.dtype, tensor.shape) for tensor in inputs.constants)
    return inputs.key, kinds, inputs.noise


def _smallest(inputs: GraphInputs) -> list[int]:
    """Return the smallest number of tokens that each step has room for."""
    first = 1 if inputs.key is None else FIRST_TOKENS
    return [first] + [1] * (len(inputs.steps) - 1)


class StepBuffers:
    """Fixed buffers of one step of a graph; `fixed` are those that are sent from the host."""

    def __init__(
        self,
        bucket: StepBucket,
        inputs: Inputs,
        fixed: Iterator[Tensor],
        capacity: int,
        device: torch.device,
    ):
        self.inputs = [
            next(fixed) if t.device.type == "cpu" else t.new_zeros(rows, *t.shape[1:])
            for t, rows in zip(inputs.tensors, bucket.rows, strict=True)
        ]
        self._device = device
        self._slot_mapping = next(fixed)
        wide = padded(inputs.layout, bucket.sizes, capacity)
        self._layout = with_tensors(wide, [next(fixed) for _ in tensors_of(wide)])

    def fill(self, tensors: Sequence[Tensor], sees: Tensor | None) -> None:
        """Copy tensors of the device to the fixed addresses."""
        for buffer, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.device.type != "cpu":
                assert buffer.dtype == tensor.dtype, "copies must not round"
                buffer[: len(tensor)] = tensor
        if sees is not None:
            self._layout.bits[: sees.shape[0], : sees.shape[1]] = sees

    def step(self, pool: KVPool) -> PackedStep:
        """Return the step as the attention function reads it."""
        return PackedStep.of_layout(pool, self._layout, self._slot_mapping, self._device)


class Shape:
    """Fixed buffers of the inputs of one bucket, and its graph once it is captured.

    Attributes:
        uses, warm_ups: number of runs without a graph so far, and before it is captured.
        nbytes: bytes of the outputs.
        key: that of the program; None for a single step.
        steps: buffers of each step.
        constants, noise: see `Program`, on the device.
    """

    def __init__(self, bucket: Bucket, inputs: GraphInputs, capacity: int, device: torch.device):
        self.uses = self.nbytes = self.warm_ups = 0
        self.bucket, self.key = bucket, inputs.key
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Tensor] = []
        self._device = device
        hosted = inputs.hosted(bucket, capacity)
        self._buffer = TensorBuffer(hosted, device)
        # Inputs are assembled here: slices of arrays are several times as fast as those of tensors.
        self._staged = TensorBuffer(hosted, torch.device("cpu"))
        self._arrays = [tensor.numpy() for tensor in self._staged.tensors]
        fixed = iter(self._buffer.tensors)
        self.constants = [next(fixed) for _ in inputs.constants]
        self.steps = [
            StepBuffers(part, step, fixed, capacity, device)
            for part, step in zip(bucket.steps, inputs.steps, strict=True)
        ]
        self.noise: Tensor | None = None
        if inputs.noise is not None:
            self.noise = torch.empty(inputs.noise, dtype=torch.float32, device=device)

    def fill(self, inputs: GraphInputs) -> None:
        """Copy inputs to the fixed addresses, those of the host in one transfer; draw noise."""
        inputs.write(iter(self._arrays), self.bucket)
        self._buffer.copy(self._staged)
        first = inputs.steps[0]
        self.steps[0].fill(first.tensors, first.sees)
        if self.noise is not None:
            self.noise.exponential_()

    def record(self, compute: ShapeCompute, pool: KVPool, memory: Any) -> None:
        """Capture the launches of `compute` without running them."""
        with recording(self._device, memory) as graph:
            self.outputs = compute(self, pool)
        self.graph = graph


# (fixed inputs, KV pool) -> outputs.
ShapeCompute = Callable[[Shape, KVPool], list[Tensor]]


@dataclass(frozen=True)
class Program:
    """Steps of one model and what is computed between them, to be run as one graph.

    Attributes:
        key: hashable, equal for programs that launch the same for inputs of the same shapes; None
            if the program cannot be captured.
        steps: tensors and packed step of each step, see `GraphInputs`; steps by `StepGraphs.run`.
        compute: (constants, noise) -> outputs, on the device. It runs the steps in order, by
            `StepGraphs.run`, may be called several times, and must not synchronize with the device.
        constants: host tensors that `compute` reads on the device.
        noise: shape of the exponential random numbers that `compute` reads; None for none.
    """

    key: Hashable
    steps: Sequence[tuple[Sequence[Tensor], PackedStep]]
    compute: Callable[[list[Tensor], Tensor | None], list[Tensor]]
    constants: Sequence[Tensor] = ()
    noise: tuple[int, ...] | None = None

    @property
    def inputs(self) -> GraphInputs:
        """All inputs."""
        steps = [Inputs(tensors, *step.on_host, step.sees) for tensors, step in self.steps]
        return GraphInputs(steps, self.key, self.constants, self.noise)
