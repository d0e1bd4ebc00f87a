"""Where the adapters of a model hang; asking a model that has none does not import PEFT."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hf_spec.adapters.folder import SpecAdapter

if TYPE_CHECKING:
    from hf_spec.generation.peft_type import SpecLayer

# The module's name on the model. PEFT looks over names with its prefix of the type in them,
# "hf_spec_", for the weights of an adapter, which this is not.
LAYER_NAME = "spec_adapters"


def spec_layer(model: nn.Module) -> SpecLayer | None:
    """The module with the adapters of `model`, None if there is none."""
    layer = getattr(model, LAYER_NAME, None)
    if layer is None:
        return None
    from hf_spec.generation.peft_type import SpecLayer

    return layer if isinstance(layer, SpecLayer) else None


def active_adapters(model: nn.Module) -> list[SpecAdapter]:
    """The adapters of this library that hang on `model` and are switched on."""
    layer = spec_layer(model)
    return [] if layer is None else layer.active
