"""Copies of a user's processors and criteria, one for each sequence that goes its own pace."""

from __future__ import annotations

import copy
import io
import queue
import threading
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_spec.common.errors import UnsupportedError

# Members that hold no state of a sequence, are too large to copy, or reach out of the object.
SHARED = (
    nn.Module,
    PreTrainedTokenizerBase,
    io.IOBase,
    queue.Queue,
    threading.Condition,
    threading.Event,
    type(threading.Lock()),
    type(threading.RLock()),
)


def own_copy(thing: Any, purpose: str) -> Any:
    """A copy that remembers for itself; models, tokenizers, files, events and locks are shared.

    What cannot be copied is refused; `purpose` says in the error what it would follow.
    """
    members = getattr(thing, "__dict__", {}).values()
    shared: dict[int, Any] = {id(m): m for m in members if isinstance(m, SHARED)}
    try:
        return copy.deepcopy(thing, shared)
    except Exception as error:
        raise UnsupportedError(
            f"{type(thing).__name__} cannot be copied ({error}), so it cannot follow {purpose} "
            "that advance at different speeds; use batch size 1"
        ) from error
