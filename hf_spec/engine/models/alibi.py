"""ALiBi (Press et al. 2021, arXiv 2108.12409) for token trees, on Bloom and Falcon.

These models compute their position bias from a 2D padding mask, which a 4D tree mask breaks. Adding
a constant per query does not change a softmax, so the bias is slope * key position. The models'
builder of the bias is replaced while any forward pass needs it, and uses the key positions of the
forward pass in its own thread.
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

# Name under which the models call the builder of their bias.
NAME = "build_alibi_tensor"


def uses_alibi(model: PreTrainedModel) -> bool:
    """Return True for models whose bias this module replaces."""
    kind = model.config.model_type
    return kind == "bloom" or (kind == "falcon" and bool(model.config.alibi))


class _Forward(threading.local):
    # (B, S) int64 true positions of the keys in the forward pass of this thread.
    key_positions: Tensor | None = None


_forward = _Forward()
_lock = threading.Lock()
# By id of the patched object: the attribute that it had itself, and how many forwards need ours.
_patched: dict[int, tuple[Any, int]] = {}


@contextmanager
def tree_alibi(model: PreTrainedModel, key_positions: Tensor) -> Iterator[None]:
    """Compute the model's ALiBi from (B, S) int64 key positions inside the block."""
    if not uses_alibi(model):
        yield
        return
    bloom = model.config.model_type == "bloom"
    # Bloom calls a method of its decoder, Falcon a function of its module.
    owner: Any = model.transformer if bloom else modeling_falcon
    with _replaced(owner, rounds=not bloom):
        before, _forward.key_positions = _forward.key_positions, key_positions
        try:
            yield
        finally:
            _forward.key_positions = before


def _tree_builder(plain: Callable[..., Tensor], rounds: bool) -> Callable[..., Tensor]:
    """Return a builder of the bias; `rounds` if the model's own multiplies in bfloat16."""

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        key_positions = _forward.key_positions
        if key_positions is None:
            return plain(mask, num_heads, dtype)
        # The bias of position 1 is the slope of each head.
        pair = key_positions.new_ones(1, 2)
        slopes = build_alibi_tensor(pair, num_heads, torch.float32)[:, 0, 1]
        # bfloat16 rounds from position 256 on, and the model was trained with that.
        slopes = slopes.bfloat16() if rounds else slopes
        bias = slopes[None, :, None] * key_positions[:, None, :]
        return bias.reshape(-1, 1, key_positions.shape[1]).to(dtype)

    return build


@contextmanager
def _replaced(owner: Any, rounds: bool) -> Iterator[None]:
    """Replace the owner's builder while any block needs it."""
    with _lock:
        original, users = _patched.get(id(owner), (vars(owner).get(NAME), 0))
        if not users:
            setattr(owner, NAME, _tree_builder(getattr(owner, NAME), rounds))
        _patched[id(owner)] = original, users + 1
    try:
        yield
    finally:
        with _lock:
            original, users = _patched.pop(id(owner))
            if users > 1:
                _patched[id(owner)] = original, users - 1
            elif original is None:
                delattr(owner, NAME)
            else:
                setattr(owner, NAME, original)
