"""Values that are computed once per model and cached as long as it lives."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

T = TypeVar("T")


class _Cache:
    """Values of one model. The lock is reentrant: making one value may need another."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.values: dict[Hashable, Any] = {}


_caches: WeakKeyDictionary[PreTrainedModel, _Cache] = WeakKeyDictionary()
_lock = threading.Lock()


def cached_per_model(model: PreTrainedModel, key: Hashable, make: Callable[[], T]) -> T:
    """Return the value cached for (model, key); call `make` on a miss.

    Other threads that want a value of the same model wait meanwhile.
    """
    with _lock:
        cache = _caches.setdefault(model, _Cache())
    with cache.lock:
        if key not in cache.values:
            cache.values[key] = make()
        value: T = cache.values[key]
    return value
