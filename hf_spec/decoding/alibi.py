"""ALiBi for token trees on the models that compute it from a 2D padding mask.

Bloom and Falcon build their position bias from the mask, which a 4D tree mask breaks. Softmax does
not change when a constant is added per query, so slope * key position is all the bias needs, and
true key positions make it right for trees, ragged rows and reused slots alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.falcon import modeling_falcon


def uses_alibi(model: PreTrainedModel) -> bool:
    """True for the architectures whose bias this module knows how to replace."""
    kind = model.config.model_type
    return kind == "bloom" or (kind == "falcon" and bool(model.config.alibi))


@contextmanager
def tree_alibi(model: PreTrainedModel, key_positions: Tensor) -> Iterator[None]:
    """Compute the model's ALiBi from key positions for the forward inside the block.

    Args:
        model: any model; those without ALiBi are left alone.
        key_positions: (B, S) int64, the true position of every key.
    """
    if not uses_alibi(model):
        yield
        return

    bloom = model.config.model_type == "bloom"

    def build(mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
        # The bias of position 1 is the slope of each head.
        pair = key_positions.new_ones(1, 2)
        slopes = build_alibi_tensor(pair, num_heads, torch.float32)[:, 0, 1]
        # Falcon multiplies in bfloat16, which rounds behind position 256; its own tokens need that.
        slopes = slopes if bloom else slopes.bfloat16()
        bias = slopes[None, :, None] * key_positions[:, None, :]
        return bias.reshape(-1, 1, key_positions.shape[1]).to(dtype)

    # Bloom asks a method of its decoder, Falcon a function of its module.
    owner: Any = model.transformer if bloom else modeling_falcon
    before = owner.__dict__.get("build_alibi_tensor")
    owner.build_alibi_tensor = build
    try:
        yield
    finally:
        if before is None:
            del owner.build_alibi_tensor
        else:
            owner.build_alibi_tensor = before
