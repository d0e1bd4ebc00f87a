"""Caches of latents, from which keys and values are computed (multi-head latent attention).

Packed attention stores keys and values. A cache that the model filled itself is therefore expanded
when it is loaded; there is no way back, so a user's cache cannot be continued.
"""

from __future__ import annotations

from typing import Any

from transformers import Cache, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from hf_spec.engine.forward.tree_attention import takes_packed

# Method of attention modules: (latents, rotated part) as they are cached -> keys, values.
METHOD = "expand_kv"


def caches_latents(model: PreTrainedModel) -> bool:
    """Return True if a model caches latents, while packed attention stores keys and values."""
    return takes_packed(model) and any(hasattr(module, METHOD) for module in model.modules())


def expanded(model: PreTrainedModel, cache: Cache) -> Cache:
    """Return the keys and values of a cache, which is not changed."""
    if not caches_latents(model):
        return cache
    result = DynamicCache()
    result.layers = list(cache.layers)
    for module in model.modules():
        attention: Any = module
        if hasattr(attention, METHOD):
            index, layer = attention.layer_idx, DynamicLayer()
            latents: Any = cache.layers[index]
            layer.update(*attention.expand_kv(latents.keys, latents.values))
            result.layers[index] = layer
    return result
