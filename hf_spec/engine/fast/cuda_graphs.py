"""Packed steps as CUDA graphs, captured once per shape and replayed.

A small step runs faster on a GPU than the host can launch it; a captured step is a single launch.
Inputs must keep their addresses and shapes, so tokens are padded to a few sizes inside the graph.
Padding is not stored, no token attends to it, and it is cut off the outputs. Kernels read the
layout on the device, so the lengths of the KV cache need no sizes of their own. When the KV pool
grows, its addresses change and steps are captured again.

A shape runs twice before it is captured; the second run raises if an operation synchronizes with
the device. A step runs in the smallest captured shape that holds it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache, partial
from typing import Any

import torch
from hf_spec_kernels import serves
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import NoWaits, WaitError, switch, warm_ups
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.backend.device.placement import looks_for_outliers
from hf_spec.backend.device.transfer import send
from hf_spec.engine.fast.graph_shapes import Bucket, Compute, Inputs, Shape
from hf_spec.engine.forward.kv_pool import MAX_RESERVED, KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.models.recurrent_layers import mixers_of

logger = logging.getLogger(__name__)

# Device types that can capture graphs.
DEVICES = {"cuda"}
# Larger steps are not bound by launches, and lengths of prompts rarely repeat.
MAX_TOKENS, MAX_QUERIES = 1024, 256
# Limits per model: graphs, and bytes of their inputs and outputs, which are mostly logits.
MAX_GRAPHS, MAX_OUTPUT_BYTES = 32, 2**29
# Extra tokens per slot for the last draft, which may exceed the maximum length.
DRAFT_ROOM = 64
# Largest pool that is stored for later calls, in tokens of all slots.
MAX_STORED_TOKENS = 2**16
WARM_UPS = 2
OUT_OF_MEMORY = "the device ran out of memory in this call"


def obstacle(model: nn.Module) -> str | None:
    """Return why steps of `model` cannot be captured, or None; capturing may still fail."""
    if switch.mode == "off":
        return "set_cuda_graphs('off')"
    if mixers_of(model):
        return "its recurrent layers run row by row"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return "its weights are on " + ", ".join(sorted(map(str, devices)))
    for name, module in model.named_modules():
        if (reason := _module_obstacle(module)) is not None:
            return f"{name or 'the model'} {reason}"
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
        self.refusal = obstacle(model)
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
        pool.before_resize, pool.when_full = self.clear, self._stop
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
        run = partial(self._run, compute, tensors, step)
        return self._pool.retried(run) if self._can_repeat else run()

    def _run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        # A failed attempt may have marked layers.
        step.written.clear()
        if not self._is_padded(tensors, step):
            return compute(self.put(tensors, step), step)
        inputs = Inputs(tensors, *step.on_host, step.sees)
        shape = self._fitting(inputs) or self._warming(inputs)
        shape.fill(inputs)
        settles = shape.graph is None and shape.uses <= WARM_UPS and self.refusal is None
        warm_ups.count += settles
        if shape.graph is None and shape.uses >= WARM_UPS and shape.nbytes <= MAX_OUTPUT_BYTES:
            self._record(compute, shape)
        if shape.graph is not None:
            shape.graph.replay()
            self.replays += 1
            return shape.outputs
        shape.uses += 1
        outputs = self._try(compute, shape)
        shape.nbytes = sum(tensor.nbytes for tensor in (*outputs, *shape.inputs))
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
        pool.before_resize = pool.when_full = None
        small = pool.capacity * pool.num_slots <= MAX_STORED_TOKENS
        if self._key is not None and self._recorded and small:
            buffers, recorded = (pool.keys, pool.values), (self._recorded, self._memory)
            graphs = StoredGraphs(self._key, self._state, pool.capacity, buffers, *recorded)
            graph_store.put(self._owner, graphs)
            pool.keys, pool.values, self._recorded = {}, {}, {}
        self.clear()

    def _begin(self, length: int) -> None:
        pool = self._pool
        if self._key is not None and not pool.keys:
            first = min(length, MAX_RESERVED // pool.num_slots)
            if graphs := graph_store.pop(self._owner, self._key, first):
                pool.capacity, (pool.keys, pool.values) = graphs.capacity, graphs.buffers
                self._recorded, self._memory = graphs.recorded, graphs.memory
                self._state = graphs.state
                for buffer in (*pool.keys.values(), *pool.values.values()):
                    buffer.zero_()
        pool.expect(length)

    def _stop(self) -> None:
        if self.refusal is None:
            self.refusal = OUT_OF_MEMORY
            _log_once(type(self._model).__name__, OUT_OF_MEMORY, logging.WARNING)
        self.clear()

    def _is_padded(self, tensors: Sequence[Tensor], step: PackedStep) -> bool:
        if self.refusal is not None and not switch.always_padded:
            return False
        longest = max(segment.end - segment.start for segment in step.segments)
        return len(tensors[0]) <= MAX_TOKENS and longest <= MAX_QUERIES

    def _fitting(self, inputs: Inputs) -> Shape | None:
        bucket = min((bucket for bucket in self._recorded if bucket.holds(inputs)), default=None)
        if bucket is None:
            return None
        # Mark it as used last.
        shape = self._recorded[bucket] = self._recorded.pop(bucket)
        return shape

    def _warming(self, inputs: Inputs) -> Shape:
        bucket = Bucket.of(inputs)
        shape = self._warm.pop(bucket, None)
        shape = shape or Shape(bucket, inputs, self._pool.capacity, self._device)
        self._warm[bucket] = shape
        if len(self._warm) > MAX_GRAPHS:
            del self._warm[next(iter(self._warm))]
        return shape

    def _try(self, compute: Compute, shape: Shape) -> list[Tensor]:
        if self.refusal is None and shape.uses == WARM_UPS:
            try:
                with NoWaits(self._device):
                    return compute(shape.inputs, shape.step(self._pool))
            except WaitError as error:
                self._refuse(str(error))
        return compute(shape.inputs, shape.step(self._pool))

    def _record(self, compute: Compute, shape: Shape) -> None:
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
            self._refuse(f"recording failed: {error}")
            return
        self.captures += 1
        self._recorded[shape.bucket] = self._warm.pop(shape.bucket)
        while len(self._recorded) > MAX_GRAPHS or self._output_bytes() > MAX_OUTPUT_BYTES:
            del self._recorded[next(iter(self._recorded))]

    def _output_bytes(self) -> int:
        return sum(shape.nbytes for shape in self._recorded.values())

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self.clear()
        graph_store.refusals[self._model] = reason
        _log_once(type(self._model).__name__, reason, logging.WARNING)


def is_of_transformers(hook: Callable[..., Any]) -> bool:
    """Return True for hooks that transformers registers."""
    return getattr(hook, "__module__", "").partition(".")[0] == "transformers"


@cache
def _log_once(name: str, reason: str, level: int) -> None:
    logger.log(level, "steps of %s run without CUDA graphs: %s", name, reason)
