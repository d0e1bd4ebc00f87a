"""Packed steps as CUDA graphs: what a model computes is recorded once per shape and replayed.

A small step takes a GPU less time than the host takes to launch it. A recorded step is one launch.
Its inputs have to stand where they stood when it was recorded, in the same shapes, so tokens are
padded to a few sizes, inside the graph only: padding is stored nowhere, seen by no token and cut
off from the outputs. What a token looks at comes from the layout, which the kernels read on the
device, so lengths need no sizes of their own. When the storage grows, its addresses change and
recording starts again.

A shape runs twice in this form before it is recorded the third time, the second time with nothing
allowed that waits for the device. A step goes to the smallest shape recorded that holds it. What is
recorded stays for later calls on the model, together with the storage (see `graph_store`). Where
nothing can be recorded (see `obstacle`) steps run as they come, and one line of the log says why.

When the device runs out of memory, all graphs, stored pools and unused room are freed, the step
runs once more, and the rest of the call runs without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from functools import cache
from typing import Any

import torch
from hf_spec_kernels import serves
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device import graph_store
from hf_spec.backend.device.capture import switch
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.backend.device.placement import looks_for_outliers
from hf_spec.backend.device.transfer import send
from hf_spec.backend.device.waits import NoWaits, WaitError
from hf_spec.engine.fast.graph_shapes import Bucket, Compute, Inputs, Shape
from hf_spec.engine.forward.kv_pool import MAX_RESERVED, KVPool
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.models.recurrent_layers import mixers_of

logger = logging.getLogger(__name__)

# Types of devices that can record graphs.
DEVICES = {"cuda"}
# Larger steps keep a GPU busy by themselves, and a prompt has no size of its own.
MAX_TOKENS, MAX_QUERIES = 1024, 256
# Of one model at a time, and bytes of all their outputs, of which logits are most.
MAX_GRAPHS, MAX_OUTPUT_BYTES = 32, 2**29
# Tokens of a slot for the last draft, which may reach beyond the end.
DRAFT_ROOM = 64
# Tokens of all slots of a pool that is kept for later calls.
MAX_KEPT_TOKENS = 2**16
WARM_UPS = 2
OUT_OF_MEMORY = "the device ran out of memory in this call"


def obstacle(model: nn.Module) -> str | None:
    """Why the steps of `model` cannot be recorded, or None; trying may still show a reason."""
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
    # A replayed graph calls no Python; accelerate's own hook also loads offloaded weights.
    # Hooks of transformers collect hidden states, which a graph keeps.
    if hasattr(module, "_hf_hook") or not all(map(is_of_transformers, hooks)):
        return "has hooks"
    if looks_for_outliers(module):
        return "looks for outliers on the host; load with llm_int8_threshold=0, or in 4 bits"
    return None


class StepGraphs:
    """Runs the packed steps of one model, recorded where that is possible.

    Args:
        model: whose steps.
        pool: where they write; empty, or no graph of an earlier call fits.
        device: where they run.
        cache_key: key under which graphs and pool are kept for later calls; None to keep nothing.
        length: how many tokens a slot will hold at most; 0 if it is unknown.
        owner: the module that holds all that steps read, and to which kept graphs belong; `model`
            by default. A head is more than its layers.

    Attributes:
        replays: graphs launched in place of steps.
        captures: graphs recorded.
        refusal: why nothing can be recorded, or None.
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
        self._owner = owner or model
        self._recurrent = bool(mixers_of(model))
        self._pool = pool
        self._device = device
        self._kernels = serves(torch.empty(0, dtype=model.dtype, device=device))
        self.refusal = obstacle(model)
        if self.refusal is None and not self._kernels:
            self.refusal = "the kernels do not serve it"
        if self.refusal is not None:
            wanted = device.type in DEVICES and switch.mode != "off"
            level = logging.WARNING if wanted else logging.INFO
            _say_once(type(model).__name__, self.refusal, level)
        # That was said when it failed.
        self.refusal = self.refusal or graph_store.refusal(model)
        self._memory: Any = None
        # Least recently used first.
        self._recorded: dict[Bucket, Shape] = {}
        self._met: dict[Bucket, Shape] = {}
        self._key = None if self.refusal or cache_key is None else (device, cache_key)
        self._state: object = None
        pool.before_resize = self.clear
        if self.refusal is None:
            self._begin(length + DRAFT_ROOM if length else 0)

    def run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """The outputs of a step of T tokens, and maybe further rows; good until the next step.

        Tensors are (T, ...), the first one whole, the others maybe with fewer rows, on the host or
        the device. `compute` must ask the device nothing, and may be called a second time.

        Raises:
            OutOfMemoryError: a second time, or of a model with recurrent layers, whose states a
                failed step may have changed.
        """
        try:
            return self._run(compute, tensors, step)
        except torch.OutOfMemoryError:
            if self._recurrent:
                raise
            # Not here: while the error is handled, it keeps the tensors of the failed step.
        self._free_memory()
        step.written.clear()
        return self._run(compute, tensors, step)

    def _run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        if not self._is_padded(tensors, step):
            return compute(self.put(tensors, step), step)
        inputs = Inputs(tensors, *step.on_host, step.sees)
        shape = self._fitting(inputs) or self._warming(inputs)
        shape.fill(inputs)
        if shape.graph is None and shape.uses >= WARM_UPS and shape.nbytes <= MAX_OUTPUT_BYTES:
            self._record(compute, shape)
        if shape.graph is not None:
            shape.graph.replay()
            self.replays += 1
            return shape.outputs
        shape.uses += 1
        outputs = self._try(compute, shape)
        shape.nbytes = sum(output.nbytes for output in outputs)
        return outputs

    def put(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """The tensors on the device, in one transfer with what the kernels read of the step."""
        hosted = [t for t in tensors if t.device.type == "cpu"]
        sent = iter(
            step.send(self._device, *hosted) if self._kernels else send(hosted, self._device)
        )
        return [next(sent) if t.device.type == "cpu" else t for t in tensors]

    def clear(self) -> None:
        """Drop what was recorded, and its memory."""
        self._recorded.clear()
        self._met.clear()
        self._memory = None

    def close(self) -> None:
        """End the call: a later one on the same model gets what was recorded, and the pool."""
        pool = self._pool
        pool.before_resize = None
        small = pool.capacity * pool.num_slots <= MAX_KEPT_TOKENS
        if self._key is not None and self._recorded and small:
            buffers = pool.keys, pool.values
            kept = StoredGraphs(
                self._key, self._state, pool.capacity, buffers, self._recorded, self._memory
            )
            graph_store.put(self._owner, kept)
            pool.keys, pool.values, self._recorded = {}, {}, {}
        self.clear()

    def _begin(self, length: int) -> None:
        """Take over what an earlier call has kept, and make room for up to `length` tokens."""
        pool = self._pool
        if self._key is not None and not pool.keys:
            first = min(length, MAX_RESERVED // pool.num_slots)
            if kept := graph_store.pop(self._owner, self._key, first):
                pool.capacity, (pool.keys, pool.values) = kept.capacity, kept.buffers
                self._recorded, self._memory = kept.recorded, kept.memory
                self._state = kept.state
                for buffer in (*pool.keys.values(), *pool.values.values()):
                    buffer.zero_()
        pool.expect(length)

    def _free_memory(self) -> None:
        """Free what this call can do without, and what other calls have left."""
        if self.refusal is None:
            self.refusal = OUT_OF_MEMORY
            _say_once(type(self._model).__name__, OUT_OF_MEMORY, logging.WARNING)
        self.clear()
        graph_store.free()
        self._pool.trim()

    def _is_padded(self, tensors: Sequence[Tensor], step: PackedStep) -> bool:
        if self.refusal is not None and not switch.always_padded:
            return False
        longest = max(segment.end - segment.start for segment in step.segments)
        return len(tensors[0]) <= MAX_TOKENS and longest <= MAX_QUERIES

    def _fitting(self, inputs: Inputs) -> Shape | None:
        """The smallest shape recorded that holds a step of this size."""
        found = min((one for one in self._recorded if one.holds(inputs)), default=None)
        if found is None:
            return None
        self._recorded[found] = self._recorded.pop(found)
        return self._recorded[found]

    def _warming(self, inputs: Inputs) -> Shape:
        """A shape that is not recorded yet; those that never will be make room for it."""
        bucket = Bucket.of(inputs)
        capacity = self._pool.capacity
        shape = self._met.pop(bucket, None) or Shape(bucket, inputs, capacity, self._device)
        self._met[bucket] = shape
        if len(self._met) > MAX_GRAPHS:
            del self._met[next(iter(self._met))]
        return shape

    def _try(self, compute: Compute, shape: Shape) -> list[Tensor]:
        """A step as it comes; the last one before recording must not wait for the device."""
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
            # Not earlier: a first forward may register hooks of transformers, or fill tables.
            self._state = graph_store.state_of(self._owner)
        try:
            self._memory = self._memory or torch.cuda.graph_pool_handle()
            shape.record(compute, self._pool, self._memory)
        except torch.OutOfMemoryError:
            # No refusal: `run` frees memory and goes on.
            raise
        except RuntimeError as error:
            self._refuse(f"recording failed: {error}")
            return
        self.captures += 1
        self._recorded[shape.bucket] = self._met.pop(shape.bucket)
        while len(self._recorded) > MAX_GRAPHS or self._output_bytes() > MAX_OUTPUT_BYTES:
            del self._recorded[next(iter(self._recorded))]

    def _output_bytes(self) -> int:
        return sum(shape.nbytes for shape in self._recorded.values())

    def _refuse(self, reason: str) -> None:
        """Record nothing of the model any more, in later calls neither."""
        self.refusal = reason
        self.clear()
        graph_store.refuse(self._model, reason)
        _say_once(type(self._model).__name__, reason, logging.WARNING)


def is_of_transformers(hook: Callable[..., Any]) -> bool:
    """Whether a hook is one that transformers itself registers."""
    return getattr(hook, "__module__", "").partition(".")[0] == "transformers"


@cache
def _say_once(name: str, reason: str, level: int) -> None:
    logger.log(level, "steps of %s run without CUDA graphs: %s", name, reason)
