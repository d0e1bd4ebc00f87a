"""What makes PEFT and transformers know the type HF_SPEC, without an import of PEFT.

PEFT takes as long to import as all the rest of this package, and imports bitsandbytes where that is
installed. So the type is registered as soon as someone else has imported PEFT, or has already.
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

# Attribute of the wrapper that holds what it wraps.
_WRAPPED = "_hf_spec_wrapped"


class _AfterImport(MetaPathFinder):
    """Calls `then` when `name` has been imported; finds nothing by itself."""

    def __init__(self, name: str, then: Callable[[], None]):
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What the other finders find, with `then` after it."""
        if name != self._name:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        # Asking for a spec, as those do who only want to know whether PEFT is there, runs nothing.
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                run(module)
                self._then()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _register() -> None:
    # By name: it may be this very module that imports PEFT, and be half done.
    importlib.import_module("hf_spec.generation.peft_type")


_AFTER_PEFT = _AfterImport("peft", _register)


def enable() -> None:
    """Make PEFT know the type, and transformers' `load_adapter` read it; twice is harmless."""
    if "peft" in sys.modules:
        _register()
    elif _AFTER_PEFT not in sys.meta_path:
        sys.meta_path.insert(0, _AFTER_PEFT)
    if not hasattr(PeftAdapterMixin.load_adapter, _WRAPPED):
        wrapped = _wrap(PeftAdapterMixin.load_adapter)
        PeftAdapterMixin.load_adapter = wrapped  # type: ignore[method-assign]


def disable() -> None:
    """Give transformers' `load_adapter` back as it was; a PEFT that knows the type keeps it."""
    if _AFTER_PEFT in sys.meta_path:
        sys.meta_path.remove(_AFTER_PEFT)
    original = getattr(PeftAdapterMixin.load_adapter, _WRAPPED, None)
    if original is not None:
        PeftAdapterMixin.load_adapter = original  # type: ignore[method-assign]


def _wrap(original: Any) -> Any:
    """The original reads files by itself, a pickle too; adapters of ours go past it."""

    @functools.wraps(original)
    def load_adapter_(
        self: PreTrainedModel,
        peft_model_id: Any = None,
        adapter_name: str | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        where = _download_arguments(kwargs)
        if peft_model_id is None or not is_adapter(peft_model_id, **where):
            return original(self, peft_model_id, adapter_name, *args, **kwargs)
        from hf_spec.generation.peft_type import NOT_TRAINED_HERE, attach

        if kwargs.get("is_trainable"):
            raise AssistantError(NOT_TRAINED_HERE)
        attach(self, load_adapter(peft_model_id, **where), adapter_name or "default")
        return None

    setattr(load_adapter_, _WRAPPED, original)
    return load_adapter_


def _download_arguments(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Revision and token, from where transformers looks for them."""
    given: dict[str, Any] = {}
    given.update(getattr(kwargs.get("load_config"), "download_kwargs", None) or {})
    given.update(kwargs.get("download_kwargs") or {})
    given.update(kwargs.get("adapter_kwargs") or {})
    return {name: given.get(name) for name in ("revision", "token")}
