"""What recorded steps leave for the next call on the same model.

Graphs are bound to where the keys and values of a pool lie, so both are kept together, for as long
as the model lives and everything in it is as it was when they were recorded.
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
# One pool per model: those of several batch sizes would each take memory that a call may need.
_kept: WeakKeyDictionary[nn.Module, Kept] = WeakKeyDictionary()
_refusals: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()


@dataclass
class Kept:
    """Graphs and the pool that they write to.

    Attributes:
        key: whose they are, such as the batch size.
        state: of the model while they were recorded, see `state_of`.
        capacity: of the pool, in tokens per slot.
        buffers: keys and values of the pool by layer.
        recorded: the graphs.
        memory: the pool of memory that they share.
    """

    key: Hashable
    state: object
    capacity: int
    buffers: tuple[dict[int, Tensor], dict[int, Tensor]]
    recorded: Any
    memory: Any


def take(model: nn.Module, key: Hashable, length: int) -> Kept | None:
    """Remove and return what was kept for `model`, or None if it does not fit.

    It fits a call with the same key, with room for `length` tokens per slot, on a model that has
    not changed. What does not fit is freed.
    """
    with _lock:
        kept = _kept.pop(model, None)
    if kept is None or kept.key != key or kept.capacity < length:
        return None
    return kept if kept.state == state_of(model) else None


def give(model: nn.Module, kept: Kept) -> None:
    """Keep graphs and their pool for a later call, instead of what was kept before."""
    with _lock:
        _kept[model] = kept


def free() -> None:
    """Free the graphs and pools of all models."""
    with _lock:
        _kept.clear()


def refuse(model: nn.Module, reason: str) -> None:
    """Remember that the steps of `model` cannot be recorded."""
    _refusals[model] = reason


def refusal(model: nn.Module) -> str | None:
    """Why recording failed before, if it did."""
    return _refusals.get(model)


def forget() -> None:
    """Give back all that is kept, and try again what failed."""
    free()
    _refusals.clear()


def state_of(model: nn.Module) -> object:
    """All that a forward of `model` reads in Python or by address; equal as long as it is the same.

    A graph goes on computing with the weights, numbers and branches that it was recorded with.
    """
    return _Frozen()(model), _settings()


def _settings() -> tuple[object, ...]:
    """Of PyTorch, by which the same call may launch other kernels."""
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


class _Frozen:
    """Values to compare later; an object counts as the same while it is that object.

    Modules and configs are compared by what they hold.
    """

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    def __call__(self, value: Any) -> object:
        if type(value) in _PLAIN:
            return value
        if type(value) in (Tensor, nn.Parameter):
            return value.data_ptr(), value.device, value.dtype, value.shape, value.stride()
        if isinstance(value, dict):
            # Written for speed: modules are full of numbers and empty containers.
            return [
                (key, one if type(one) in _PLAIN else self(one))
                for key, one in value.items()
                if type(one) not in _EMPTY or one
            ]
        if isinstance(value, (set, frozenset)):
            value = sorted(value, key=repr)
        if isinstance(value, (list, tuple)):
            return tuple(map(self, value))
        if isinstance(value, (nn.Module, PreTrainedConfig)):
            return self._members(value)
        return _Same(value)

    def _members(self, value: Any) -> object:
        # The second time by a number: modules are shared, and may lead back to themselves.
        if id(value) in self._numbers:
            return self._numbers[id(value)]
        self._numbers[id(value)] = len(self._numbers)
        kind = type(value).forward if isinstance(value, nn.Module) else type(value)
        return kind, self(vars(value))


_PLAIN = {bool, int, float, str, bytes, type(None), torch.dtype, torch.device, type}
# Of hooks and the like; an empty one is as good as none.
_EMPTY = {dict, OrderedDict, set}


class _Same:
    """Equal to another of the same object; keeps nothing alive."""

    def __init__(self, value: Any):
        # Bound methods are made whenever they are asked for.
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
        # Nothing else is equal to it.
        return object()
