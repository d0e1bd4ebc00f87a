"""Adapters that are attached to a model; asking one that has none does not import PEFT."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_spec.adapters.folder import SpecAdapter

# The module's name on the model. PEFT looks over names with its prefix of the type in them,
# "hf_spec_", for the weights of an adapter, which this is not.
LAYER_NAME = "spec_adapters"


def active_adapters(model: nn.Module) -> list[SpecAdapter]:
    """The adapters of this library that are attached to `model` and switched on."""
    layer: Any = getattr(model, LAYER_NAME, None)
    found = getattr(layer, "active", ())
    # A module of somebody else's may have the name.
    if not isinstance(found, (list, tuple)):
        return []
    return [adapter for adapter in found if isinstance(adapter, SpecAdapter)]
