"""Copies of a user's processors and criteria, one per sequence that advances at its own speed."""

from __future__ import annotations

import copy
import io
import queue
import threading
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase

from hf_spec.common.errors import UnsupportedError

# Members that are shared: stateless, too large to copy, or connected to the outside.
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


def independent_copy(original: Any, purpose: str) -> Any:
    """Return a copy with state of its own; models, tokenizers, files, events and locks are shared.

    Raises:
        UnsupportedError: `original` cannot be copied; the message names the `purpose` of the copy.
    """
    members = getattr(original, "__dict__", {}).values()
    shared: dict[int, Any] = {id(m): m for m in members if isinstance(m, SHARED)}
    try:
        return copy.deepcopy(original, shared)
    except Exception as error:
        raise UnsupportedError(
            f"{type(original).__name__} cannot be copied ({error}), so it cannot follow {purpose} "
            "that advance at different speeds; use batch size 1"
        ) from error
