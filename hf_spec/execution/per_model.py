"""What is made once for a model and kept as long as it lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

Made = TypeVar("Made")

_made: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def made_once(model: PreTrainedModel, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives for `model`, kept as long as the model lives.

    Args:
        model: it belongs to.
        key: what tells this thing from others of the same model.
        make: called the first time.
    """
    known = _made.setdefault(model, {})
    if key not in known:
        known[key] = make()
    return known[key]
