"""Where the adapters of a model hang: a module without weights, and with no part in the forward."""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from hf_spec.adapters.folder import SpecAdapter

# The module's name on the model. PEFT looks over names with its prefix of the type in them,
# "hf_spec_", for the weights of an adapter, which this is not.
LAYER_NAME = "spec_adapters"


class SpecLayer(nn.Module, BaseTunerLayer):
    """The adapters of a model: PEFT switches them here as it does in a layer of a LoRA.

    Attributes:
        adapters: by the names that PEFT knows them by.
    """

    # Not weights: PEFT need not cast, freeze or save them.
    adapter_layer_names = ()
    other_param_names = ("adapters",)
    # It wraps no layer whose they would be.
    weight = None  # type: ignore[assignment]
    bias = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__()
        self.adapters: dict[str, SpecAdapter] = {}
        self._active_adapter: list[str] = []
        self._disable_adapters = False
        self.merged_adapters: list[str] = []

    @property
    def active(self) -> list[SpecAdapter]:
        """The adapters that are switched on."""
        if self._disable_adapters:
            return []
        return [self.adapters[name] for name in self.active_adapters]

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Choose among the adapters here; a name of none of them, as of a LoRA, changes nothing."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        known = [name for name in names if name in self.adapters]
        if known or not names:
            self._active_adapter = known

    def extra_repr(self) -> str:
        """Names and methods."""
        return ", ".join(f"{name}: {adapter.method}" for name, adapter in self.adapters.items())


def spec_layer(model: nn.Module) -> SpecLayer | None:
    """The module with the adapters of `model`, None if there is none."""
    layer = getattr(model, LAYER_NAME, None)
    return layer if isinstance(layer, SpecLayer) else None


def active_adapters(model: nn.Module) -> list[SpecAdapter]:
    """The adapters of this library that hang on `model` and are switched on."""
    layer = spec_layer(model)
    return [] if layer is None else layer.active
