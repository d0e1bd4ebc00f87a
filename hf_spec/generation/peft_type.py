"""The PEFT type HF_SPEC: PEFT and transformers load, select and save our adapters.

An adapter takes no part in the model's forward pass. It is attached to the model in a module
without weights, where `generate(spec_strategy=...)` finds it. Importing this module registers the
type with PEFT; `peft_hook` does so.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from peft import PeftConfig, PeftType
from peft.mapping import inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import register_peft_method
from torch import Tensor, nn

from hf_spec.adapters.folder import LAYER_NAME, PEFT_TYPE, SpecAdapter, load_adapter
from hf_spec.adapters.quantized import dequantize, quantize
from hf_spec.common.errors import AssistantError, SpecError
from hf_spec.methods.loading import cached_adapter


@dataclass
class SpecPeftConfig(PeftConfig):
    """Config of an adapter in PEFT; `adapter` is the one that was loaded with it, if any."""

    task_type: Any = "CAUSAL_LM"
    method: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=dict)

    # A ClassVar, because dataclass fields are written to the file.
    adapter: ClassVar[SpecAdapter | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(PEFT_TYPE)

    @classmethod
    def of(cls, adapter: SpecAdapter) -> SpecPeftConfig:
        """Return the config of `adapter`, for inference."""
        config = cls(
            base_model_name_or_path=adapter.base.name,
            inference_mode=True,
            method=adapter.method,
            options=adapter.options,
            base=asdict(adapter.base),
        )
        config.adapter = adapter  # type: ignore[misc]
        return config

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str, subfolder: str | None = None, **kwargs: Any
    ) -> SpecPeftConfig:
        """Load the whole adapter, before PEFT reads a file or changes the model."""
        name = Path(pretrained_model_name_or_path, subfolder or "")
        return cls.of(
            load_adapter(name, revision=kwargs.get("revision"), token=kwargs.get("token"))
        )


class SpecLayer(nn.Module, BaseTunerLayer):
    """The adapters of a model by name, which PEFT switches as in the layers of a LoRA."""

    # No weights, so PEFT does not cast, freeze or save them.
    adapter_layer_names = ()
    other_param_names = ("adapters",)
    # There is no wrapped layer.
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
        """The active adapters."""
        if self._disable_adapters:
            return []
        return [self.adapters[name] for name in self.active_adapters]

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Activate adapters; names of other adapters, such as a LoRA, change nothing."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        selected = [name for name in names if name in self.adapters]
        if selected or not names:
            self._active_adapter = selected

    def extra_repr(self) -> str:
        """Return names and methods of the adapters."""
        return ", ".join(f"{name}: {adapter.method}" for name, adapter in self.adapters.items())


class SpecTuner(BaseTuner):
    """Attaches adapters of this type to a model for PEFT."""

    prefix = f"{PEFT_TYPE.lower()}_"
    tuner_layer_cls = SpecLayer

    def inject_adapter(self, model: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Attach an adapter to `model`; an adapter that does not fit leaves it unchanged."""
        config = self.peft_config[adapter_name]
        try:
            adapter = _usable(config)
            cached_adapter(adapter, model)
        except SpecError:
            # This may be the model's own dictionary.
            del self.peft_config[adapter_name]
            raise
        layer = spec_layer(model)
        if layer is None:
            layer = SpecLayer()
            model.add_module(LAYER_NAME, layer)
        layer.adapters[adapter_name] = adapter
        if adapter_name in self.active_adapters:
            layer.set_adapter(adapter_name)

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("no layer of the model is replaced")

    def unload(self) -> nn.Module:
        """Remove the adapters from the model and return it."""
        delattr(self.model, LAYER_NAME)
        return super().unload()

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> nn.Module:
        """Do the same as `unload`: there is nothing to merge."""
        return self.unload()

    # PEFT converts between the weights of a model and a file; here both are the adapter's.

    @classmethod
    def _get_adapter_state_dict(
        cls, model: nn.Module, config: PeftConfig, *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        adapter = _usable(config)
        return quantize(adapter.tensors, adapter.bits)

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: PeftConfig, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return nothing to load: the weights came with the config and cannot be replaced."""
        loaded = _usable(config).tensors
        tensors, _ = dequantize(state_dict, f"the adapter {adapter_name!r}")
        same = loaded.keys() == tensors.keys() and all(
            loaded[name].equal(tensor.to(loaded[name])) for name, tensor in tensors.items()
        )
        if not same:
            raise AssistantError(
                f"the adapter {adapter_name!r} is already loaded with other weights; delete it "
                "first, or pass another adapter_name"
            )
        return {}


def spec_layer(model: nn.Module) -> SpecLayer | None:
    """Return the module with the adapters of `model`, None if there is none."""
    layer = getattr(model, LAYER_NAME, None)
    return layer if isinstance(layer, SpecLayer) else None


def attach(model: Any, adapter: SpecAdapter, name: str) -> None:
    """Attach `adapter` to `model` like transformers' `load_adapter`."""
    if name in getattr(model, "peft_config", {}):
        raise AssistantError(f"the adapter {name!r} already exists; pass another adapter_name")
    inject_adapter_in_model(SpecPeftConfig.of(adapter), model, name)
    model._hf_peft_config_loaded = True


NOT_TRAINED_HERE = (
    "PEFT cannot train an adapter of hf_spec, which takes no part in the model's forward pass; use "
    "`hf-spec train`"
)


def _usable(config: Any) -> SpecAdapter:
    if config.adapter is None:
        raise AssistantError(
            "a config of type HF_SPEC without its weights is not an adapter; load the folder: "
            "model.load_adapter(folder) or PeftModel.from_pretrained(model, folder)"
        )
    if not config.inference_mode:
        raise AssistantError(NOT_TRAINED_HERE)
    return config.adapter


def _add_member(name: str) -> None:
    """Add a member to PEFT's enum of types, which has no public way to do so."""
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member
    type.__setattr__(PeftType, name, member)


_add_member(PEFT_TYPE)
register_peft_method(name=PEFT_TYPE.lower(), config_cls=SpecPeftConfig, model_cls=SpecTuner)
