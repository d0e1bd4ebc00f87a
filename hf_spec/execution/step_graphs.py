"""Packed steps as CUDA graphs: what a model computes is recorded once per shape and replayed.

A small step takes a GPU less time than the host takes to launch it. A recorded step is one launch.
Its inputs have to stand where they stood when it was recorded, in the same shapes, so tokens are
padded to a few sizes, inside the graph only: padding is stored nowhere, seen by no token and cut
off from the outputs. What a token looks at comes from the layout, which the kernels read on the
device, so lengths need no sizes of their own; when the storage grows, recording starts again.

A shape runs twice in this form before it is recorded the third time. Where nothing can be recorded
(see `obstacle`) steps run as they come, and one line of the log says why.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from hf_spec_kernels import RaggedLayout, serves
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from hf_spec.devices.transfer import Block, send
from hf_spec.execution.attention import PackedStep
from hf_spec.execution.kv_cache import KVPool
from hf_spec.execution.mixers import mixers_of
from hf_spec.execution.ragged_layout import padded, round_up, tensors_of, with_tensors

logger = logging.getLogger(__name__)

# Inputs on the device, (T, ...) each, and the step they belong to -> outputs, (T, ...) each.
Compute = Callable[[list[Tensor], PackedStep], list[Tensor]]

MODES = ("auto", "off")
# Larger steps keep a GPU busy by themselves.
MAX_TOKENS = 256
# Of one model at a time; bounds what their outputs take.
MAX_GRAPHS = 32
WARM_UPS = 2


@dataclass
class _Switch:
    mode: str = "auto"
    # The padded form on every device, for tests where nothing can be recorded.
    always_padded: bool = False


_switch = _Switch()
_recording = threading.Lock()


def set_cuda_graphs(mode: str) -> None:
    """Choose whether decoding steps on a GPU are recorded as CUDA graphs.

    Args:
        mode: `auto` records wherever it can be done, `off` nothing. A generation under way goes on
            as it began.

    Raises:
        ValueError: if `mode` is none of these.
    """
    if mode not in MODES:
        raise ValueError(f"unknown CUDA graph mode {mode!r}; choose one of {', '.join(MODES)}")
    _switch.mode = mode


@contextmanager
def cuda_graphs(mode: str) -> Iterator[None]:
    """`set_cuda_graphs` for what begins inside the block."""
    before = _switch.mode
    set_cuda_graphs(mode)
    try:
        yield
    finally:
        _switch.mode = before


@contextmanager
def padded_steps() -> Iterator[None]:
    """Run steps that begin inside the block in the form of graphs, recorded or not."""
    before = _switch.always_padded
    _switch.always_padded = True
    try:
        yield
    finally:
        _switch.always_padded = before


def obstacle(model: nn.Module) -> str | None:
    """Why the steps of `model` cannot be recorded, or None; trying may still show a reason."""
    if _switch.mode == "off":
        return "set_cuda_graphs('off')"
    if mixers_of(model):
        return "its recurrent layers run row by row"
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) > 1:
        return "its weights are on " + ", ".join(sorted(map(str, devices)))
    for name, module in model.named_modules():
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        # A replayed graph calls no Python; accelerate's own hook also brings offloaded weights.
        # Those of transformers collect hidden states, which a graph holds on to.
        if hasattr(module, "_hf_hook") or not all(map(_is_of_transformers, hooks)):
            return f"{name or 'the model'} has hooks"
    if any(device.type != "cuda" for device in devices):
        return f"it is on {devices.pop()}"
    return None


class StepGraphs:
    """Runs the packed steps of one model, recorded where that is possible, and counts `replays`."""

    def __init__(self, model: PreTrainedModel, pool: KVPool, device: torch.device):
        self.replays = 0
        self._name = type(model).__name__
        self._pool = pool
        self._device = device
        self._kernels = serves(torch.empty(0, dtype=model.dtype, device=device))
        self._records = False
        if (reason := obstacle(model)) is None:
            self._records = self._kernels
            reason = None if self._kernels else "the kernels do not serve it"
        if reason is not None:
            _say_once(self._name, reason)
        self._padded = self._records or _switch.always_padded
        self._capacity = pool.capacity
        self._memory: Any = None
        self._shapes: dict[object, _Shape] = {}

    def run(self, compute: Compute, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """The outputs of a step of T tokens, and maybe further rows; good until the next step.

        Tensors are (T, ...), the first one whole, the others maybe with fewer rows, on the host or
        the device. `compute` must ask the device nothing.
        """
        num_tokens = len(tensors[0])
        if not self._padded or num_tokens > MAX_TOKENS:
            return compute(self.put(tensors, step), step)
        if self._capacity != self._pool.capacity:
            self.clear()
            self._capacity = self._pool.capacity
        size = round_up(num_tokens)
        layout, places = step.on_host
        layout = padded(layout, size, self._capacity)
        places = F.pad(places, (0, size - num_tokens), value=-1)
        tensors = [_lengthened(t) if t.device.type == "cpu" else t for t in tensors]
        key = _key(tensors, layout)
        if key not in self._shapes:
            if len(self._shapes) == MAX_GRAPHS:
                return compute(self.put(tensors, step), step)
            self._shapes[key] = _Shape(tensors, places, layout, self._device)
        shape = self._shapes[key]
        shape.fill(tensors, places, layout)
        if shape.graph is None and self._records and shape.uses >= WARM_UPS:
            self._record(compute, shape)
        if shape.graph is None:
            shape.uses += 1
            return compute(shape.inputs, shape.step(self._pool))
        shape.graph.replay()
        self.replays += 1
        return shape.outputs

    def put(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """The tensors on the device, in one transfer with what the kernels read of the step."""
        hosted = [t for t in tensors if t.device.type == "cpu"]
        sent = iter(
            step.send(self._device, *hosted) if self._kernels else send(hosted, self._device)
        )
        return [next(sent) if t.device.type == "cpu" else t for t in tensors]

    def clear(self) -> None:
        """Drop what was recorded, and its memory."""
        self._shapes.clear()
        self._memory = None

    def _record(self, compute: Compute, shape: _Shape) -> None:
        try:
            # PyTorch records one graph at a time, and leaves its stream current if that fails.
            with _recording, torch.cuda.device(self._device), _this_stream():
                self._memory = self._memory or torch.cuda.graph_pool_handle()
                shape.record(compute, self._pool, self._memory)
        except RuntimeError as error:
            self._records = False
            self._padded = _switch.always_padded
            _say_once(self._name, f"recording failed: {error}")


class _Shape:
    """One shape of steps: where its inputs stand, its graph, and where its outputs are."""

    def __init__(
        self,
        tensors: Sequence[Tensor],
        places: Tensor,
        layout: RaggedLayout,
        device: torch.device,
    ):
        self.uses = 0
        self.graph: torch.cuda.CUDAGraph | None = None
        self.outputs: list[Tensor] = []
        self._device = device
        hosted = [t for t in tensors if t.device.type == "cpu"]
        self._block = Block([*hosted, places, *tensors_of(layout)], device)
        standing = iter(self._block.tensors)
        self.inputs = [
            next(standing) if t.device.type == "cpu" else torch.zeros_like(_lengthened(t))
            for t in tensors
        ]
        self._places = next(standing)
        self._layout = with_tensors(layout, list(standing))

    def fill(self, tensors: Sequence[Tensor], places: Tensor, layout: RaggedLayout) -> None:
        """Put the inputs of a step where they are looked for."""
        hosted = [t for t in tensors if t.device.type == "cpu"]
        self._block.fill([*hosted, places, *tensors_of(layout)])
        for mine, tensor in zip(self.inputs, tensors, strict=True):
            if tensor.device.type != "cpu":
                mine[: len(tensor)] = tensor

    def step(self, pool: KVPool) -> PackedStep:
        """The step as the attention function takes it."""
        return PackedStep.of_layout(pool, self._layout, self._places, self._device)

    def record(self, compute: Compute, pool: KVPool, memory: Any) -> None:
        """Record what `compute` launches; nothing runs yet."""
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process may go on using the GPU.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            self.outputs = compute(self.inputs, self.step(pool))
        self.graph = graph


def _key(tensors: Sequence[Tensor], layout: RaggedLayout) -> tuple[object, ...]:
    """All that a graph holds fast."""
    kinds = ((t.device, t.dtype, round_up(len(t)), t.shape[1:]) for t in tensors)
    return len(layout.slot), layout.bits.shape[1], layout.max_queries, *kinds


def _lengthened(tensor: Tensor) -> Tensor:
    missing = round_up(len(tensor)) - len(tensor)
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])


def _this_stream() -> Any:
    return torch.cuda.stream(torch.cuda.current_stream())


def _is_of_transformers(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").partition(".")[0] == "transformers"


@cache
def _say_once(name: str, reason: str) -> None:
    logger.info("steps of %s run without CUDA graphs: %s", name, reason)
