"""Copies of a user's processors and criteria, one per sequence that advances at its own speed."""

from __future__ import annotations

import copy
import io
import queue
import threading
from collections.abc import Callable, Sequence
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


def independent_copies(
    originals: Sequence[Any], is_shared: Callable[[Any], bool], purpose: str
) -> list[Any]:
    """Return the originals, all but those that `is_shared` copied with state of their own.

    Objects that several of them refer to are copied once. Models, tokenizers, files, events and
    locks are shared.

    Raises:
        UnsupportedError: one cannot be copied; the message names the `purpose` of the copies.
    """
    shared: dict[int, Any] = {}
    for original in originals:
        members = getattr(original, "__dict__", {}).values()
        shared |= {id(member): member for member in members if isinstance(member, SHARED)}
    copies = []
    for original in originals:
        try:
            copies.append(original if is_shared(original) else copy.deepcopy(original, shared))
        except Exception as error:
            raise UnsupportedError(
                f"{type(original).__name__} cannot be copied ({error}), so it cannot follow "
                f"{purpose} that advance at different speeds; use batch size 1"
            ) from error
    return copies
