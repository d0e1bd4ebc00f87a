"""Position scaling of queries in layers that read it from the cache and not from `position_ids`.

Layers of Llama 4 without rotary positions take the length of the cache plus the token's index in
the forward pass as a position. A cache that reports the difference restores the right positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Architecture -> the config setting that turns the scaling on.
SCALED_QUERIES = {"llama4_text": "attn_temperature_tuning"}


def scales_queries(model: PreTrainedModel) -> bool:
    """Return True if layers of a model scale their queries by the length of its cache."""
    config = model.config.get_text_config()
    setting = SCALED_QUERIES.get(config.model_type)
    return setting is not None and bool(getattr(config, setting))


class QueryPositions:
    """Cache stand-in for one packed step; it stores nothing and reports token positions.

    The (T,) int64 `positions` are those in plain `generate()`, which counts padding.
    """

    def __init__(self, positions: Tensor):
        self._lengths = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """Return (T,) numbers to add to the index of each token in the forward pass."""
        return self._lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the step alone; the attention function stores them."""
        return key_states, value_states
