"""Caches of latents: what keys and values are made from (multi-head latent attention).

Such a model caches one small vector per token, and makes the keys and values of all heads from it
in every forward. Packed attention is given those, and stores them. So what a model has cached by
itself is made into keys and values when it is taken over, and there is no way back: a cache of the
user's cannot be continued.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_spec.engine.forward.tree_attention import takes_packed

# Of an attention module: (latents, rotated part) as they are cached -> keys, values.
METHOD = "expand_kv"


def caches_latents(model: PreTrainedModel) -> bool:
    """Whether the cache of a model differs in kind from what packed attention stores."""
    return takes_packed(model) and any(hasattr(module, METHOD) for module in model.modules())


def expanded(model: PreTrainedModel, cache: Cache) -> Cache:
    """The keys and values of a cache, which is not changed."""
    if not caches_latents(model):
        return cache
    made = DynamicCache()
    made.layers = list(cache.layers)
    for module in model.modules():
        attention: Any = module
        if hasattr(attention, METHOD):
            layer: Any = cache.layers[attention.layer_idx]
            made.layers[attention.layer_idx] = DynamicLayer()
            made.layers[attention.layer_idx].update(*attention.expand_kv(layer.keys, layer.values))
    return made
