"""What is made once for a model and kept as long as it lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

Made = TypeVar("Made")

_made: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def made_once(model: PreTrainedModel, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives for `model` the first time that it is asked for by `key`."""
    known = _made.setdefault(model, {})
    if key not in known:
        known[key] = make()
    return known[key]
