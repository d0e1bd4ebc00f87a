"""Where tokens stand, for layers that ask the cache for it and not `position_ids`.

The layers of Llama 4 without rotary positions scale their queries by the place of each token, which
is the length of the cache plus the token's index in the forward. In a packed step neither says
anything. A cache that answers with the difference of the two, for every token, puts them right.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Architectures with such layers, unless their config turns the scaling off.
SCALED_BY_PLACE = {"llama4_text": "attn_temperature_tuning"}


def scales_by_place(model: PreTrainedModel) -> bool:
    """Whether layers of a model scale their queries by the length of its cache."""
    config = model.config.get_text_config()
    setting = SCALED_BY_PLACE.get(config.model_type)
    return setting is not None and bool(getattr(config, setting))


class TokenPlaces:
    """Stands for a cache in one packed step, keeps nothing, and tells where tokens stand.

    `places` are (T,) int64, of every token its place in the frame of plain `generate()`, which
    counts padding.
    """

    def __init__(self, places: Tensor):
        self._lengths = places - torch.arange(len(places), device=places.device)

    def get_seq_length(self, layer_idx: int = 0) -> Tensor:
        """(T,) what must be added to the index of each token in the forward."""
        return self._lengths

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the step alone; the attention function stores them."""
        return key_states, value_states
