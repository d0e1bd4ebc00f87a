"""Packed steps as CUDA graphs, captured once per shape and replayed.

A small step runs faster on a GPU than the host can launch it; a captured step is a single launch.
Inputs must keep their addresses and shapes, so tokens are padded to a few sizes inside the graph.
Padding is not stored, no token attends to it, and it is cut off the outputs. Kernels read the
layout on the device, so the lengths of the KV cache need no sizes of their own. When the KV pool
grows, its addresses change and steps are captured again.

A shape runs twice before it is captured; the second run raises if an operation synchronizes with
the device. A step runs in the smallest captured shape that holds it.

A `Program` is several steps with what is computed between them, such as all passes of a draft. It
is one graph if that can be captured; else its steps run one by one.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import chain, starmap
from typing import Any

import torch
from hf_spec_kernels import serves
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import (
    GROUPED_MM,
    NoWaits,
    WaitError,
    grouped_mm_waits,
    switch,
    warm_ups,
)
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.backend.device.placement import looks_for_outliers
from hf_spec.backend.device.transfer import send
from hf_spec.common.logging import log_once
from hf_spec.engine.fast.graph_shapes import (
    Bucket,
    Compute,
    GraphInputs,
    Inputs,
    Program,
    Shape,
    ShapeCompute,
)
from hf_spec.engine.forward.kv_pool import MAX_RESERVED, KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.models.recurrent_layers import mixers_of

logger = logging.getLogger(__name__)

# Device types that can capture graphs.
DEVICES = {"cuda"}
# Larger steps are not bound by launches, and lengths of prompts rarely repeat.
MAX_GRAPH_TOKENS, MAX_QUERIES = 1024, 256
# Most tokens of a row in the first step of a program. After a prompt, steps run one by one.
MAX_PROGRAM_QUERIES = 32
# Limits per model: graphs, and bytes of their inputs and outputs, which are mostly logits.
MAX_GRAPHS, MAX_OUTPUT_BYTES = 32, 2**29
# Extra tokens per slot for the last draft, which may exceed the maximum length.
DRAFT_ROOM = 64
# Largest pool that is stored for later calls, in tokens of all slots.
MAX_STORED_TOKENS = 2**16
WARM_UPS = 2
# A program runs step by step so often, then once as a whole, and then it is captured. Some shapes
# occur once in a call, such as that of its last draft, for which steps are captured already.
RUNS_BY_STEP = 1
OUT_OF_MEMORY = "the device ran out of memory in this call"


def obstacle(model: nn.Module, reads: Sequence[nn.Module] = ()) -> str | None:
    """Return why steps of `model` cannot be captured, or None; capturing may still fail.

    The steps also run the modules `reads`, which belong to another model.
    """
    if switch.mode == "off":
        return "set_cuda_graphs('off')"
    if mixers_of(model):
        return "its recurrent layers run row by row"
    devices = {parameter.device for part in (model, *reads) for parameter in part.parameters()}
    if len(devices) > 1:
        return "its weights are on " + ", ".join(sorted(map(str, devices)))
    for part in (model, *reads):
        for name, module in part.named_modules():
            if (reason := _module_obstacle(module)) is not None:
                what = "the model" if part is model else f"the target's {type(part).__name__}"
                return f"{name or what} {reason}"
    if any(device.type not in DEVICES for device in devices):
        return f"it is on {devices.pop()}"
    return None


def _module_obstacle(module: nn.Module) -> str | None:
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    # A replay runs no Python; the hook of accelerate also loads offloaded weights. Hooks of
    # transformers only collect hidden states, which are outputs of a graph.
    if hasattr(module, "_hf_hook") or not all(map(is_of_transformers, hooks)):
        return "has hooks"
    if looks_for_outliers(module):
        return "looks for outliers on the host; load with llm_int8_threshold=0, or in 4 bits"
    return None


class StepGraphs:
    """Runs the packed steps of one model, as CUDA graphs if possible.

    When the device runs out of memory, all graphs, stored pools and unused capacity are freed, the
    step runs again, and the rest of the call runs without graphs.

    Args:
        model: runs the steps.
        pool: KV pool of the steps; must be empty for stored graphs to be used.
        device: device of the steps.
        cache_key: key under which graphs and pool are stored for later calls; None stores nothing.
        length: maximum number of tokens per slot; 0 if unknown.
        owner: module that contains everything that steps read, `model` by default; stored graphs
            belong to it. A draft head contains more than its layers.

    Attributes:
        replays: number of graph launches.
        captures: number of captured graphs.
        refusal: why steps cannot be captured, or None.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KVPool,
        device: torch.device,
        cache_key: Hashable = None,
        length: int = 0,
        owner: nn.Module | None = None,
    ):
        self.replays = self.captures = 0
        self._model = model
        self._can_repeat = not mixers_of(model)
        self._owner = owner or model
        self._pool = pool
        self._device = device
        self._kernels = serves(torch.empty(0, dtype=model.dtype, device=device))
        self.refusal = self._obstacle()
        if self.refusal is None and not self._kernels:
            self.refusal = "the kernels do not support it"
        if self.refusal is not None:
            wanted = device.type in DEVICES and switch.mode != "off"
            level = logging.WARNING if wanted else logging.INFO
            _log_once(type(model).__name__, self.refusal, level)
        # Logged when it failed.
        self.refusal = self.refusal or graph_store.refusals.get(model)
        self._memory: Any = None
        # Least recently used first.
        self._recorded: dict[Bucket, Shape] = {}
        self._warm: dict[Bucket, Shape] = {}
        self._key = None if self.refusal or cache_key is None else (device, cache_key)
        self._state: object = None
        pool.before_resize.append(self.clear)
        pool.when_full.append(self._stop)
        if self.refusal is None:
            self._begin(length + DRAFT_ROOM if length else 0)

    def run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """Run a step of T tokens; the outputs are valid until the next step and may be padded.

        Args:
            compute: the step; must not synchronize with the device, and may be called twice.
            tensors: (T, ...) on the host or the device; all but the first may have fewer rows.
            step: the attention step.

        Raises:
            OutOfMemoryError: if it occurs twice, or with recurrent layers, whose states a failed
                step may have changed.
        """
        if _thread.program is not None:
            return _thread.program.run(compute, tensors, step.sees)
        run = partial(self._run, compute, tensors, step)
        return self._pool.retried(run) if self._can_repeat else run()

    def run_program(self, program: Program) -> list[Tensor]:
        """Run a program as one graph if possible; its outputs are valid until it runs again."""
        outputs = None
        if self.captures_programs and program.key is not None and self._fits_program(program):
            outputs = self._pool.retried(partial(self._run_program, program))
        return self._run_by_step(program) if outputs is None else outputs

    @property
    def captures_programs(self) -> bool:
        """True if a program may run as one graph."""
        return self._can_repeat and (self.refusal is None or switch.always_padded)

    @property
    def device(self) -> torch.device:
        """Device of the steps."""
        return self._device

    def _run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        # A failed attempt may have marked layers.
        step.written.clear()
        if not self._is_padded(tensors, step):
            return compute(self.put(tensors, step), step)
        inputs = GraphInputs([Inputs(tensors, *step.on_host, step.sees)])
        outputs = self._run_shape(
            inputs, lambda shape, pool: compute(shape.steps[0].inputs, shape.steps[0].step(pool))
        )
        assert outputs is not None, "a step runs in any case"
        return outputs

    def _run_program(self, program: Program) -> list[Tensor] | None:
        """Run a program on fixed inputs; return None if it turns out that it cannot be captured."""

        def compute(shape: Shape, pool: KVPool) -> list[Tensor]:
            _thread.program = _RunningProgram(shape, pool)
            try:
                return program.compute(shape.constants, shape.noise)
            finally:
                _thread.program = None

        if not self.captures_programs:
            # After the device ran out of memory.
            return None
        return self._run_shape(program.inputs, compute)

    def _run_by_step(self, program: Program) -> list[Tensor]:
        constants = send(program.constants, self._device) if program.constants else []
        return program.compute(constants, None)

    def _fits_program(self, program: Program) -> bool:
        if program.key in graph_store.refused_programs.get(self._model, ()):
            return False
        _, first = program.steps[0]
        fits = all(starmap(self._is_padded, program.steps))
        return fits and _longest(first) <= MAX_PROGRAM_QUERIES

    def _run_shape(self, inputs: GraphInputs, compute: ShapeCompute) -> list[Tensor] | None:
        shape = self._fitting(inputs) or self._warming(inputs)
        is_rare = shape.graph is None and shape.uses < RUNS_BY_STEP
        if inputs.key is not None and (is_rare or shape.nbytes > MAX_OUTPUT_BYTES):
            shape.uses += 1
            warm_ups.count += is_rare
            return None
        shape.fill(inputs)
        settles = shape.graph is None and shape.uses <= shape.warm_ups and self.refusal is None
        warm_ups.count += settles
        ready = shape.uses >= shape.warm_ups and shape.nbytes <= MAX_OUTPUT_BYTES
        if shape.graph is None and ready:
            self._record(compute, shape)
        if shape.graph is not None:
            shape.graph.replay()
            self.replays += 1
            return shape.outputs
        if inputs.key in graph_store.refused_programs.get(self._model, ()):
            return None
        shape.uses += 1
        outputs = self._try(compute, shape)
        if outputs is None:
            return None
        inputs_of_steps = chain.from_iterable(step.inputs for step in shape.steps)
        shape.nbytes = sum(tensor.nbytes for tensor in (*outputs, *inputs_of_steps))
        return outputs

    def put(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """Return the tensors on the device, sent in one transfer with the layout of the step."""
        hosted = [t for t in tensors if t.device.type == "cpu"]
        device = self._device
        kernels = self._kernels and not step.has_prompt
        sent = iter(step.send(device, *hosted) if kernels else send(hosted, device))
        return [next(sent) if t.device.type == "cpu" else t for t in tensors]

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        self._recorded.clear()
        self._warm.clear()
        self._memory = None

    def close(self) -> None:
        """End the call; store graphs and pool for later calls on the same model."""
        pool = self._pool
        pool.before_resize.remove(self.clear)
        pool.when_full.remove(self._stop)
        small = pool.capacity * pool.num_slots <= MAX_STORED_TOKENS
        if self._key is not None and self._recorded and small:
            key, buffers = self._stored_key(), (pool.capacity, self._release_buffers())
            recorded = self._recorded, self._memory
            graphs = StoredGraphs(key, self._state, *buffers, *recorded, pool.generation)
            graph_store.put(self._owner, graphs)
            self._recorded = {}
        self.clear()

    def _obstacle(self) -> str | None:
        return obstacle(self._model)

    def _begin(self, length: int) -> None:
        pool = self._pool
        if not pool.keys:
            first = min(length, MAX_RESERVED // pool.num_slots)
            if (graphs := self._restore(first)) is not None:
                pool.adopt(graphs.buffers, graphs.capacity, graphs.generation)
        pool.expect(length)

    def _restore(self, length: int) -> StoredGraphs | None:
        """Use and return the stored graphs of a pool for `length` tokens, if there are any."""
        if self._key is None:
            return None
        graphs = graph_store.pop(self._owner, self._stored_key(), length)
        if graphs is not None:
            self._recorded, self._memory = graphs.recorded, graphs.memory
            self._state = graphs.state
        return graphs

    def _stored_key(self) -> object:
        """Return the key of stored graphs."""
        return self._key

    def _release_buffers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Return the buffers of the pool, to be stored, and leave it without any."""
        pool = self._pool
        buffers, (pool.keys, pool.values) = (pool.keys, pool.values), ({}, {})
        return buffers

    def _stop(self) -> None:
        if self.refusal is None:
            self.refusal = OUT_OF_MEMORY
            _log_once(type(self._model).__name__, OUT_OF_MEMORY, logging.WARNING)
        self.clear()

    def _is_padded(self, tensors: Sequence[Tensor], step: PackedStep) -> bool:
        if self.refusal is not None and not switch.always_padded:
            return False
        return len(tensors[0]) <= MAX_GRAPH_TOKENS and _longest(step) <= MAX_QUERIES

    def _fitting(self, inputs: GraphInputs) -> Shape | None:
        bucket = min((bucket for bucket in self._recorded if bucket.holds(inputs)), default=None)
        if bucket is None:
            return None
        # Mark it as used last.
        shape = self._recorded[bucket] = self._recorded.pop(bucket)
        return shape

    def _warming(self, inputs: GraphInputs) -> Shape:
        bucket = Bucket.of(inputs)
        shape = self._warm.pop(bucket, None)
        shape = shape or Shape(bucket, inputs, self._pool.capacity, self._device)
        shape.warm_ups = WARM_UPS if inputs.key is None else RUNS_BY_STEP + 1
        self._warm[bucket] = shape
        if len(self._warm) > MAX_GRAPHS:
            del self._warm[next(iter(self._warm))]
        return shape

    def _try(self, compute: ShapeCompute, shape: Shape) -> list[Tensor] | None:
        """Run a shape; a program that waits for the device is refused, and returns None."""
        if self.refusal is None and shape.uses == shape.warm_ups:
            try:
                with NoWaits(self._device):
                    return compute(shape, self._pool)
            except WaitError as error:
                self._refuse(shape, _wait_reason(error))
                if shape.bucket.program is not None:
                    return None
        return compute(shape, self._pool)

    def _record(self, compute: ShapeCompute, shape: Shape) -> None:
        if self.refusal is not None:
            return
        if self._key is not None and self._state is None:
            # Not earlier: the first forward pass may register hooks of transformers or fill tables.
            self._state = graph_store.state_of(self._owner)
        try:
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            shape.record(compute, self._pool, self._memory)
        except torch.OutOfMemoryError:
            # Handled by `run`.
            raise
        except RuntimeError as error:
            self._refuse(shape, f"recording failed: {error}")
            return
        self.captures += 1
        self._recorded[shape.bucket] = self._warm.pop(shape.bucket)
        while len(self._recorded) > MAX_GRAPHS or self._output_bytes() > MAX_OUTPUT_BYTES:
            del self._recorded[next(iter(self._recorded))]

    def _output_bytes(self) -> int:
        return sum(shape.nbytes for shape in self._recorded.values())

    def _refuse(self, shape: Shape, reason: str) -> None:
        """Capture no steps of the model from now on, or not the program of `shape`."""
        if shape.bucket.program is not None:
            self._warm.pop(shape.bucket, None)
            refused = graph_store.refused_programs.setdefault(self._model, set())
            refused.add(shape.key)
            _log_once(type(self._model).__name__, f"between steps, {reason}", logging.WARNING)
            return
        self.refusal = reason
        self.clear()
        graph_store.refusals[self._model] = reason
        _log_once(type(self._model).__name__, reason, logging.WARNING)


class ReadingGraphs(StepGraphs):
    """`StepGraphs` of steps that only read the KV pool of another model, which has run.

    They also run the modules `reads` of that model. Stored graphs are used by calls in which the
    pool has the same buffers.
    """

    def __init__(
        self,
        model: Any,
        pool: KVPool,
        device: torch.device,
        reads: Sequence[nn.Module],
        cache_key: Hashable = None,
    ):
        self._reads = reads
        super().__init__(model, pool, device, cache_key)

    def _obstacle(self) -> str | None:
        reason = obstacle(self._model, self._reads)
        if reason is None and self._pool.devices() - {self._device}:
            return "keys and values of the target are on other devices"
        return reason

    def _begin(self, length: int) -> None:
        self._restore(0)

    def _stored_key(self) -> object:
        # A target that has changed, these modules among it, gets a new pool.
        return self._key, self._pool.generation

    def _release_buffers(self) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        return {}, {}


class _Thread(threading.local):
    # Program that this thread runs as one graph; its steps are not captured separately.
    program: _RunningProgram | None = None


_thread = _Thread()


class _RunningProgram:
    """The steps of a running program, whose inputs are in the buffers of a shape."""

    def __init__(self, shape: Shape, pool: KVPool):
        self._steps = iter(shape.steps)
        self._pool = pool
        self._first = True

    def run(self, compute: Compute, tensors: Sequence[Tensor], sees: Tensor | None) -> list[Tensor]:
        """Run the next step; what the program has computed for it replaces the placeholders."""
        buffers = next(self._steps)
        # Device tensors of the first step have been copied: a graph must not read where they are.
        if not self._first:
            buffers.fill(tensors, sees)
        self._first = False
        return compute(buffers.inputs, buffers.step(self._pool))


def _longest(step: PackedStep) -> int:
    """Return the most tokens of a segment."""
    return max(segment.end - segment.start for segment in step.segments)


def is_of_transformers(hook: Callable[..., Any]) -> bool:
    """Return True for hooks that transformers registers."""
    return getattr(hook, "__module__", "").partition(".")[0] == "transformers"


def _wait_reason(error: WaitError) -> str:
    """Return what waits, and in which layer, the innermost one that was running."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    running = [frame.f_locals.get("self") for frame in reversed(frames)]
    layer: Any = next((part for part in running if isinstance(part, nn.Module)), None)
    if layer is None:
        return str(error)
    reason = f"{error}, in {type(layer).__name__}"
    experts = getattr(getattr(layer, "config", None), "_experts_implementation", None)
    if experts == "eager" or (experts == "grouped_mm" and error.operation in GROUPED_MM):
        reason += "; load the model with experts_implementation='batched_mm'"
        if experts == "eager" and not any(map(grouped_mm_waits, layer.parameters())):
            reason += " or 'grouped_mm'"
    return reason


def _log_once(name: str, reason: str, level: int) -> None:
    log_once(logger, level, f"steps of {name} run without CUDA graphs: {reason}")
