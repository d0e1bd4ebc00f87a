"""Fake GPU: tensors that report a device, and a log of the operations that block the host.

Every tensor of the fake device wraps a CPU tensor, on which everything is computed. A dispatch mode
intercepts each operation and records those that would block the host on a real GPU: reading a
value, results whose size depends on data, and synchronous copies between host and device. Kernels
run as their torch references, whose inner operations are not recorded.

The device is called `meta`, the only one besides the CPU that every build of PyTorch has.
"""

from __future__ import annotations

import copy
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import hf_spec_kernels
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from hf_spec.backend.device import clock, transfer
from hf_spec.backend.device.capture import READS
from hf_spec.engine.decode import logits_processors, processor_steps
from hf_spec.engine.decode import verifiers as verification
from hf_spec.engine.fast import cuda_graphs as step_graphs
from hf_spec.engine.forward import kv_pool as kv_cache
from hf_spec.engine.forward import tree_attention as attention
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.methods.block import runner as block_runner

DEVICE = torch.device("meta")
# Operations that return the same memory.
FREE = {"detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh"}


class OnGpu(Tensor):
    """Tensor on the fake device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> OnGpu:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=DEVICE,
        )

    def __init__(self, held: Tensor):
        self.held = held

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} of a tensor on the pretended device, which has ended")

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class FakeGpu(TorchDispatchMode):
    """Dispatch mode that runs the operations of the fake device on the CPU and records them.

    Attributes:
        waits: number of operations that block the host, by kind and line of hf_spec.
        sends, fetches: copies to and from the device.
        sent_bytes, fetched_bytes: bytes that these copy.
        launches: all other device operations; a graph replay counts as one.
        dtypes: result dtypes of device operations.
        launch_seconds: device time of one launch.
        now: total device time. A mark in the queue counts as passed once the host has synchronized.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launch_seconds, self.now = 1e-3, 0.0
        self._marks = self._passed = 0
        self.restart()

    def restart(self) -> None:
        """Clear the record."""
        self.waits: Counter[str] = Counter()
        self.sends = self.fetches = self.launches = 0
        self.sent_bytes = self.fetched_bytes = 0
        self.dtypes: set[torch.dtype] = set()
        self._counts = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), func.overloadpacket.__name__
        there = [t for t in tree_leaves((args, kwargs)) if isinstance(t, OnGpu)]
        copies = self.sends + self.fetches
        on_gpu = bool(there)
        if there and name in READS:
            self._waits(name)
        if kwargs.get("device") is not None:
            on_gpu = torch.device(kwargs["device"]) == DEVICE
            if name == "_to_copy" and on_gpu != bool(there):
                self._copied(on_gpu, kwargs.get("non_blocking"), args[0])
            kwargs["device"] = torch.device("cpu")
        elif name == "copy_" and isinstance(args[0], OnGpu) != isinstance(args[1], OnGpu):
            asynchronous = args[2:] or kwargs.get("non_blocking")
            self._copied(isinstance(args[0], OnGpu), asynchronous, args[1])
            on_gpu = isinstance(args[0], OnGpu)
        elif there and name in {"index", "index_put_", "index_put"}:
            self._look_at(args[1])
        kwargs.pop("pin_memory", None)
        self.launched(on_gpu and copies == self.sends + self.fetches and launches(func))
        plain_args, plain_kwargs = tree_map(held, (args, kwargs))
        result = func(*plain_args, **plain_kwargs)
        # An operation in place returns its original wrapper.
        known = {id(held(t)): t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}

        def wrapped(value: Any) -> Any:
            if not isinstance(value, Tensor) or id(value) in known:
                return known.get(id(value), value)
            if on_gpu:
                self.dtypes.add(value.dtype)
            return OnGpu(value) if on_gpu else value

        return tree_map(wrapped, result)

    def launched(self, number: int) -> None:
        """Count device operations."""
        self.launches += number * self._counts
        self.now += number * self._counts * self.launch_seconds

    def marked(self) -> int:
        """Add a mark to the queue and return its number."""
        self._marks += 1
        return self._marks

    def synchronize(self) -> None:
        """Make the host wait until the queue is empty."""
        self._passed = self._marks

    def has_passed(self, mark: int) -> bool:
        """Return True if the device is known to have passed a mark."""
        return mark <= self._passed

    @contextmanager
    def one_launch(self) -> Iterator[None]:
        """Count the operations of the block, which a graph recorded, as one launch."""
        self.launched(1)
        before, self._counts = self._counts, False
        yield
        self._counts = before

    def _look_at(self, indices: Any) -> None:
        for index in indices:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                self._waits("index by a mask")
            elif index is not None and not isinstance(index, OnGpu):
                self._copied(True, False, index)

    def _copied(self, to_gpu: bool, asynchronous: Any, source: Tensor) -> None:
        self.sends += to_gpu
        self.fetches += not to_gpu
        self.sent_bytes += to_gpu * source.numel() * source.element_size()
        self.fetched_bytes += (not to_gpu) * source.numel() * source.element_size()
        if not asynchronous:
            self._waits("copy to the device" if to_gpu else "copy from the device")

    def _waits(self, what: str) -> None:
        self.synchronize()
        frames = traceback.extract_stack()
        ours = [f for f in frames if "/hf_spec/" in f.filename or "transformers" in f.filename]
        line = ours[-1] if ours else frames[-4]
        self.waits[f"{what} at {line.filename.rsplit('/', 1)[-1]}:{line.lineno}"] += 1


def held(value: Any) -> Any:
    """Return the CPU tensor of a fake device tensor; other values unchanged."""
    return value.held if isinstance(value, OnGpu) else value


def on_gpu(module: nn.Module) -> Any:
    """Return a copy of a module with its weights on the fake device."""
    moved = copy.deepcopy(module)
    known: dict[int, OnGpu] = {}
    for part in moved.modules():
        for tensors in (part._parameters, part._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = known.setdefault(id(tensor), OnGpu(tensor.detach()))  # type: ignore[assignment]
    return moved


def launches(func: Any) -> bool:
    """Return True if an operation computes something; views and allocations do not."""
    name = func.overloadpacket.__name__
    return not (func.is_view or name.startswith(("empty", "new_empty")) or name in FREE)


def unseen(gpu: FakeGpu, op: Callable[..., Any]) -> Callable[..., Any]:
    """Return a kernel op that runs its torch reference on the CPU tensors, as one launch."""

    def plain(value: Any) -> Any:
        return "torch" if isinstance(value, str) and value == "triton" else held(value)

    def run(*args: Any, **kwargs: Any) -> Any:
        gpu.launched(1)
        plain_args, plain_kwargs = _map((args, kwargs), plain)
        with torch.utils._python_dispatch._disable_current_modes():
            result = op(*plain_args, **plain_kwargs)
        return _map(result, lambda t: OnGpu(t) if isinstance(t, Tensor) else t)

    return run


def _map(value: Any, change: Callable[[Any], Any]) -> Any:
    """Apply `change` to all leaves, like `tree_map` but also inside dataclasses."""
    if hasattr(value, "__dataclass_fields__"):
        new = copy.copy(value)
        for name, part in vars(value).items():
            object.__setattr__(new, name, _map(part, change))
        return new
    if isinstance(value, (list, tuple)):
        return type(value)(_map(part, change) for part in value)
    if isinstance(value, dict):
        return {key: _map(part, change) for key, part in value.items()}
    return change(value)


def standing(pool: KVPool) -> KVPool:
    """Return a pool with the current buffers, which a graph reads and writes when replayed."""
    bound = KVPool(pool.num_slots)
    bound.capacity, bound.keys, bound.values = pool.capacity, dict(pool.keys), dict(pool.values)
    return bound


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch, gpu: FakeGpu) -> Iterator[None]:
    """Enable graph capture on the fake device; a replay is one launch."""

    def record(shape: Any, compute: Any, pool: Any, memory: Any) -> None:
        bound = standing(pool)
        shape.outputs = [torch.empty_like(t) for t in compute(shape, bound)]

        def replay() -> None:
            with gpu.one_launch():
                outputs = compute(shape, bound)
                for mine, new in zip(shape.outputs, outputs, strict=True):
                    mine.copy_(new)

        shape.graph = SimpleNamespace(replay=replay)

    with monkeypatch.context() as patch:
        patch.setattr(step_graphs, "DEVICES", {DEVICE.type})
        patch.setattr(torch.cuda, "graph_pool_handle", object)
        patch.setattr(step_graphs.Shape, "record", record)
        yield


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, streams: bool = True) -> Iterator[FakeGpu]:
    """Enable the fake device inside the block; without `streams` it works like MPS."""
    make = torch.tensor

    def tensor(data: Any, *, device: Any = None, **kwargs: Any) -> Tensor:
        made = make(data, **kwargs)
        return made if device is None else made.to(device)

    def on_gpu(made: Tensor) -> bool:
        return isinstance(made, OnGpu) or made.device == DEVICE

    gpu = FakeGpu()

    class Event:
        def __init__(self, enable_timing: bool = False):
            assert enable_timing

        def record(self, *stream: Any) -> None:
            assert stream == ((gpu,) if streams else ())
            self.number, self.time = gpu.marked(), gpu.now

        def query(self) -> bool:
            return gpu.has_passed(self.number)

        def elapsed_time(self, end: Event) -> float:
            # A real event raises an error here.
            assert self.query(), "the device may not have come by"
            assert end.query(), "the device may not have come by"
            return 1000 * (end.time - self.time)

    with torch.device("cpu"):
        # PyTorch stores the functions to which such a block applies at the first call.
        torch.empty(0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "tensor", tensor)
        device_module = SimpleNamespace(Event=Event)
        if streams:
            device_module.current_stream = lambda _: gpu
            patch.setattr(transfer, "ASYNCHRONOUS", {DEVICE.type})
        patch.setattr(torch, "get_device_module", lambda _: device_module)
        patch.setattr(clock, "QUEUING", {DEVICE.type})
        for module in (step_graphs, verification, logits_processors, processor_steps):
            patch.setattr(module, "serves", on_gpu)
        patch.setattr(
            attention, "implementation", lambda query, _: "triton" if on_gpu(query) else "torch"
        )
        for module, name in (
            (attention, "kv_write"),
            (block_runner, "kv_write"),
            (attention, "ragged_tree_attention"),
            (kv_cache, "kv_keep"),
            (verification, "verify_tree"),
            (verification, "filter_scores"),
            (logits_processors, "filter_scores"),
            (processor_steps, "filter_scores"),
        ):
            patch.setattr(module, name, unseen(gpu, getattr(hf_spec_kernels, name)))
        with gpu:
            yield gpu
