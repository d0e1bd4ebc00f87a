"""Register the type HF_SPEC with PEFT and transformers, once someone else has imported PEFT.

PEFT takes as long to import as the rest of this package, and may import bitsandbytes.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from transformers import PreTrainedModel
from transformers.integrations.peft import PeftAdapterMixin

from hf_spec.adapters.folder import is_adapter, load_adapter
from hf_spec.common.errors import AssistantError

# Attribute of the wrapper with the wrapped method.
WRAPPED = "_hf_spec_wrapped"


class _AfterImport(MetaPathFinder):
    """Calls `then` after the import of `name`; the other finders find the module."""

    def __init__(self, name: str, then: Callable[[], None]):
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of the other finders, whose loader then calls `then`."""
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        # `then` is called by the loader: many callers only test whether PEFT is installed.
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # By name, since that module may be the one that is importing PEFT right now.
    importlib.import_module("hf_spec.generation.peft_type")


_AFTER_PEFT = _AfterImport("peft", _register)


def enable() -> None:
    """Register the type with PEFT and wrap transformers' `load_adapter`. May be called twice."""
    if "peft" in sys.modules:
        _register()
    elif _AFTER_PEFT not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER_PEFT)
    if not hasattr(PeftAdapterMixin.load_adapter, WRAPPED):
        wrapped = _wrap(PeftAdapterMixin.load_adapter)
        PeftAdapterMixin.load_adapter = wrapped  # type: ignore[method-assign]


def disable() -> None:
    """Restore transformers' `load_adapter`. The type stays registered with PEFT."""
    if _AFTER_PEFT in sys.meta_path:
        sys.meta_path.remove(_AFTER_PEFT)
    original = getattr(PeftAdapterMixin.load_adapter, WRAPPED, None)
    if original is not None:
        PeftAdapterMixin.load_adapter = original  # type: ignore[method-assign]


def _wrap(original: Any) -> Any:
    """Return a method that loads our adapters itself; the original would unpickle files."""

    @functools.wraps(original)
    def load_adapter_(
        self: PreTrainedModel,
        peft_model_id: Any = None,
        adapter_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        source = _download_arguments(kwargs)
        if peft_model_id is None or not is_adapter(peft_model_id, **source):
            return original(self, peft_model_id, adapter_name, *args, **kwargs)
        from hf_spec.generation.peft_type import NOT_TRAINED_HERE, attach

        if kwargs.get("is_trainable"):
            raise AssistantError(NOT_TRAINED_HERE)
        attach(self, load_adapter(peft_model_id, **source), adapter_name or "default")
        return None

    setattr(load_adapter_, WRAPPED, original)
    return load_adapter_


def _download_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return revision and token from the arguments in which transformers accepts them."""
    merged: dict[str, Any] = {}
    merged.update(getattr(kwargs.get("load_config"), "download_kwargs", None) or {})
    merged.update(kwargs.get("download_kwargs") or {})
    merged.update(kwargs.get("adapter_kwargs") or {})
    return {name: merged.get(name) for name in ("revision", "token")}
