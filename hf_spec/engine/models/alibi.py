"""ALiBi for token trees on the models that compute it from a 2D padding mask.

Bloom and Falcon build their position bias from the mask, which a 4D tree mask breaks. Softmax does
not change when a constant is added per query, so slope * key position is all the bias needs, and
true key positions make it right for trees, ragged rows and reused slots alike.

Where the model looks for its builder stands one that asks which positions the forward of its own
thread has; without any it is the model's own. It goes when the last forward that needs it ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon import modeling_falcon

# What the models call for their bias.
NAME = "build_alibi_tensor"


def uses_alibi(model: PreTrainedModel) -> bool:
    """True for the architectures whose bias this module knows how to replace."""
    kind = model.config.model_type
    return kind == "bloom" or (kind == "falcon" and bool(model.config.alibi))


class _Forward(threading.local):
    """(B, S) int64, the true position of every key in the forward of this thread."""

    key_positions: Tensor | None = None


_forward = _Forward()
_lock = threading.Lock()
# Owners that hold our builder: what each had of its own, and how many forwards need ours.
_in_place: dict[int, tuple[Any, int]] = {}


@contextmanager
def tree_alibi(model: PreTrainedModel, key_positions: Tensor) -> Iterator[None]:
    """Compute the model's ALiBi from (B, S) int64 key positions for the forward in the block."""
    if not uses_alibi(model):
        yield
        return

    bloom = model.config.model_type == "bloom"
    # Bloom asks a method of its decoder, Falcon a function of its module.
    owner: Any = model.transformer if bloom else modeling_falcon
    with _replaced(owner, lambda plain: _tree_builder(plain, rounds=not bloom)):
        before, _forward.key_positions = _forward.key_positions, key_positions
        try:
            yield
        finally:
            _forward.key_positions = before


def _tree_builder(plain: Callable[..., Tensor], rounds: bool) -> Callable[..., Tensor]:
    """A builder of the bias; `rounds` says that the model's own multiplies in bfloat16."""

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        key_positions = _forward.key_positions
        if key_positions is None:
            return plain(mask, num_heads, dtype)
        # The bias of position 1 is the slope of each head.
        pair = key_positions.new_ones(1, 2)
        slopes = build_alibi_tensor(pair, num_heads, torch.float32)[:, 0, 1]
        # bfloat16 rounds from position 256 on; the model's own tokens need that.
        slopes = slopes.bfloat16() if rounds else slopes
        bias = slopes[None, :, None] * key_positions[:, None, :]
        return bias.reshape(-1, 1, key_positions.shape[1]).to(dtype)

    return build


@contextmanager
def _replaced(owner: Any, make: Callable[[Any], Any]) -> Iterator[None]:
    """Put `make(plain)` in the place of the owner's builder while any block needs it."""
    with _lock:
        own, users = _in_place.get(id(owner), (vars(owner).get(NAME), 0))
        if not users:
            setattr(owner, NAME, make(getattr(owner, NAME)))
        _in_place[id(owner)] = own, users + 1
    try:
        yield
    finally:
        with _lock:
            own, users = _in_place.pop(id(owner))
            if users > 1:
                _in_place[id(owner)] = own, users - 1
            elif own is None:
                delattr(owner, NAME)
            else:
                setattr(owner, NAME, own)
