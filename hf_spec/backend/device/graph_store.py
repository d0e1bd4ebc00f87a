"""CUDA graphs stored between calls on the same model, together with their KV pool.

Graphs are bound to the addresses of a pool's keys and values. Both are stored until the model is
deleted or differs from its state during the recording.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig

_lock = threading.Lock()
# One pool per model: pools of several batch sizes would take memory that a call may need.
_stored: WeakKeyDictionary[nn.Module, StoredGraphs] = WeakKeyDictionary()
# Models whose steps cannot be captured -> why.
refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
# Models -> keys of programs that cannot be captured, although their steps can.
refused_programs: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


@dataclass
class StoredGraphs:
    """CUDA graphs by shape, their CUDA memory pool, and the KV pool that they write to.

    Graphs that only read the KV pool of another model are stored without buffers.
    """

    # Settings of the call that recorded them, such as the batch size.
    key: object
    # `state_of` the model during the recording.
    state: object
    # Tokens per slot of the KV pool, and its keys and values by layer.
    capacity: int
    buffers: tuple[dict[int, Tensor], dict[int, Tensor]]
    recorded: Any
    memory: Any
    # `KVPool.generation` of the buffers.
    generation: int = -1


def pop(model: nn.Module, key: object, length: int) -> StoredGraphs | None:
    """Remove and return the graphs stored for `model`; free them and return None on a mismatch.

    They match a call with the same key that needs at most `length` tokens per slot, on a model that
    has not changed.
    """
    with _lock:
        graphs = _stored.pop(model, None)
    if graphs is None or graphs.key != key or graphs.capacity < length:
        return None
    return graphs if graphs.state == state_of(model) else None


def put(model: nn.Module, graphs: StoredGraphs) -> None:
    """Store graphs and their pool for a later call; replace those stored before."""
    with _lock:
        _stored[model] = graphs


def free() -> None:
    """Free the graphs and pools of all models."""
    with _lock:
        _stored.clear()


def forget() -> None:
    """Free all stored graphs and forget earlier failures."""
    free()
    refusals.clear()
    refused_programs.clear()


def state_of(model: nn.Module) -> object:
    """Return a value that is equal while a forward pass reads the same Python state and addresses.

    A graph replays the weights, numbers and branches that it was captured with.
    """
    return _frozen(model, {}), _settings()


def _settings() -> tuple[object, ...]:
    # They decide which kernels a call launches.
    matmul = torch.backends.cuda.matmul
    return (
        torch.is_inference_mode_enabled(),
        torch.get_float32_matmul_precision(),
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.get_autocast_dtype("cuda"),
    )


def _frozen(value: Any, numbers: dict[int, int]) -> object:
    """Return a snapshot for a later comparison.

    Modules, configs and containers are compared by content, other objects by identity. `numbers`
    are those of modules and configs by id: they are shared, and may refer to themselves.
    """
    if type(value) in _PLAIN:
        return value
    if type(value) in (Tensor, nn.Parameter):
        return value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
    if isinstance(value, dict):
        # Inlined for speed: modules are full of numbers and empty containers.
        return [
            (key, item if type(item) in _PLAIN else _frozen(item, numbers))
            for key, item in value.items()
            if type(item) not in _EMPTY or item
        ]
    if isinstance(value, (set, frozenset)):
        value = sorted(value, key=repr)
    if isinstance(value, (list, tuple)):
        return tuple(_frozen(item, numbers) for item in value)
    if not isinstance(value, (nn.Module, PreTrainedConfig)):
        return _Same(value)
    is_known = id(value) in numbers
    number = numbers.setdefault(id(value), len(numbers))
    kind = type(value).forward if isinstance(value, nn.Module) else type(value)
    return number if is_known else (kind, _frozen(vars(value), numbers))


_PLAIN = {bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type}
# An empty container, of hooks for instance, equals a missing one.
_EMPTY = {dict, OrderedDict, set}


class _Same:
    """Identity of an object; holds weak references only."""

    def __init__(self, value: Any):
        # Every attribute access creates a new bound method.
        parts = (value.__self__, value.__func__) if hasattr(value, "__func__") else (value,)
        self._parts = list(map(_reference, parts))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Same):
            return False
        return list(map(id, self._parts)) == list(map(id, other._parts))

    __hash__ = None  # type: ignore[assignment]


def _reference(value: Any) -> object:
    try:
        return ref(value)
    except TypeError:
        # No weak reference possible: never equal.
        return object()
