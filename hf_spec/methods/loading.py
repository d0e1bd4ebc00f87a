"""Adapters and published heads for `assistant=`, cached on the target; methods add own loaders."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import PEFT_TYPE, BaseModel
from hf_spec.adapters.folder import SpecAdapter, active_adapters, is_adapter, load_adapter
from hf_spec.adapters.published import (
    MODELS,
    PublishedHead,
    family_record,
    published_family,
    read_published,
)
from hf_spec.common.errors import AssistantError, OptionError, UnsupportedError
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.methods.draft_model.truncated import named_layers, truncated_draft

T = TypeVar("T")

# Raised by code that rebuilds a module from options and weights that do not fit each other; the
# last one by transformers' configs, which check their values.
DAMAGE = (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError, StrictDataclassError)


def find_assistant(assistant: Any, target: PreTrainedModel, methods: Collection[str] | None) -> Any:
    """Return the assistant that `assistant=` names or that is attached to the target.

    That is the adapter that a PEFT model carries; for None the adapter of the supported `methods`
    (None for all) attached to the target, several as a list, or None; for "truncated:N" the
    target's first N layers, built once; everything else unchanged.

    Raises:
        AssistantError: if several adapters are attached to the target and the strategy uses one.
        OptionError: if the target has no N layers.
    """
    if isinstance(assistant, (list, tuple)):
        return [None if a is None else find_assistant(a, target, methods) for a in assistant]
    unwrap = getattr(assistant, "get_base_model", None)
    if callable(unwrap) and getattr(assistant, "peft_type", None) == PEFT_TYPE:
        return next(iter(active_adapters(unwrap())), assistant)
    if isinstance(assistant, str) and not assistant.strip():
        raise AssistantError(f"assistant={assistant!r} is an empty name; pass a folder or a Hub id")
    if (count := named_layers(assistant)) is not None:
        return cached_per_model(
            target, (named_layers, count), lambda: truncated_draft(target, count)
        )
    if assistant is not None:
        return assistant
    fitting = [a for a in active_adapters(target) if methods is None or a.method in methods]
    if len(fitting) > 1 and methods is not None and len(methods) == 1:
        raise AssistantError(
            f"{len(fitting)} adapters of method {fitting[0].method!r} are active on the model; "
            "choose one: model.set_adapter(name), or assistant="
        )
    return fitting if len(fitting) > 1 else next(iter(fitting), None)


def strategy_of(name: str) -> str:
    """Return the strategy of an adapter, a published head or a model; "tree" for a model."""
    if is_adapter(name):
        return load_adapter(name).strategy
    family = _family_of(name)
    return "tree" if family is None else family_record(family, name).strategy


def read_once(target: PreTrainedModel, method: Hashable, name: str, read: Callable[[], T]) -> T:
    """Return `read()` for a folder or repository `name`, cached on the target per method.

    A change of the weights or configs in the folder, or of the target's device or dtype, is a cache
    miss.
    """
    # A Hub id has no local files.
    files = sorted(f for pattern in ("*.safetensors", "*.json") for f in Path(name).glob(pattern))
    stamp = tuple((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    return cached_per_model(target, (method, name, stamp, target.device, target.dtype), read)


def adapter_module(
    assistant: str | os.PathLike[str] | SpecAdapter, method: str, target: PreTrainedModel
) -> Any:
    """Return the module of an adapter of `method`, given as an object, a folder or a Hub id."""
    if isinstance(assistant, SpecAdapter):
        if assistant.method != method:
            raise AssistantError(
                f"the adapter is one of method {assistant.method!r}, not {method!r}"
            )
        return cached_adapter(assistant, target)
    name = os.fspath(assistant)
    if Path(name).is_dir() and not is_adapter(name):
        reject_published(name, "not an adapter")
    return read_once(
        target, method, name, lambda: build_adapter(load_adapter(name, method), target)
    )


def cached_adapter(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    """Return `build_adapter()`, cached on the target per device and dtype."""
    key = (adapter, target.device, target.dtype)
    return cached_per_model(target, key, lambda: build_adapter(adapter, target))


def build_adapter(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    """Build the module of `adapter`: a draft model, a classifier, a head or adaptive tokens.

    Raises:
        AssistantError: if the adapter is damaged or was trained for another model.
    """
    method = adapter.record
    adapter.base.check(target)
    what = f"the {adapter.method} adapter {str(adapter.folder or '')!r}"
    return _build_from_files(what, target, lambda: method.build(adapter, target))


def resolve_published(
    strategy: str,
    assistant: Any,
    target: PreTrainedModel,
    families: Collection[str],
    overrides: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """Return the module of a published head of one of the `families`.

    Args:
        strategy: for messages.
        assistant: folder or Hub id, a `PublishedHead`, or a module that a family's builder made;
            the module's attributes `strategy` and `base` identify it.
        target: the target model.
        families: supported by the strategy.
        overrides: (name, value) pairs that replace entries of the head's config.

    Raises:
        AssistantError: if the head is missing, damaged, of another family, or for another target.
        OptionError: if there are `overrides` for a module that is already built.
    """
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)

        def read() -> Any:
            head = _check_family(read_published(name), name, strategy, families)
            return build_published(replace(head, overrides=overrides), target)

        return read_once(target, (strategy, overrides), name, read)
    if isinstance(assistant, PublishedHead):
        head = _check_family(assistant, assistant.name, strategy, families)
        overridden = replace(head, overrides=overrides or head.overrides)
        key = (head, overridden.overrides, target.device, target.dtype)
        return cached_per_model(target, key, lambda: build_published(overridden, target))
    if assistant is not None and getattr(assistant, "strategy", None) == strategy:
        if overrides:
            raise OptionError(
                f"{', '.join(name for name, _ in overrides)} override the config of a head, "
                f"but this {type(assistant).__name__} is built already; pass "
                "assistant=<folder or Hub id>, or leave them out"
            )
        if (difference := assistant.base.difference(BaseModel.of(target))) is not None:
            raise AssistantError(
                f"this {type(assistant).__name__} was built for {difference}: build it for this "
                "model, or pass its folder or Hub id as assistant="
            )
        return assistant
    raise AssistantError(
        f"spec_strategy={strategy!r} needs a published head: pass assistant=<folder or Hub id>; "
        f"got {type(assistant).__name__}"
    )


def resolve_inside(strategy: str, target: PreTrainedModel, make: Callable[[], T]) -> T:
    """Return the module that `make` builds from further weights in the target's own files."""
    name = target.name_or_path or ""
    what = f"the module for {strategy!r} in {name!r}"
    return read_once(target, strategy, name, lambda: _build_from_files(what, target, make))


def build_published(head: PublishedHead, target: PreTrainedModel) -> Any:
    """Return the module of a published head; a damaged one raises `AssistantError`."""
    what = f"the {head.family} head {head.name!r}"
    return _build_from_files(what, target, lambda: head.record.build(head, target))


def reject_published(name: str, reason: str) -> None:
    """Raise `AssistantError` if `name` is a published head, which is `reason`."""
    family = _family_of(name)
    if family is not None and family not in MODELS:
        strategy = family_record(family, name).strategy
        raise AssistantError(
            f"assistant={name!r} is a head of the family {family!r}, {reason}: use "
            f"spec_strategy={strategy!r}"
        )


def _check_family(
    head: PublishedHead | None, name: str, strategy: str, families: Collection[str]
) -> PublishedHead:
    if head is None:
        raise AssistantError(
            f"assistant={name!r} is not a published head; spec_strategy={strategy!r} uses heads of "
            f"the families {', '.join(sorted(families))}, and 'draft' or 'tree' a whole model"
        )
    if head.family not in families:
        raise AssistantError(
            f"assistant={name!r} is a head of the family {head.family!r}: use "
            f"spec_strategy={head.strategy!r}"
        )
    return head


def _family_of(name: str) -> str | None:
    """Return the family of a published head; None for other files and unreadable ones."""
    try:
        return published_family(name)
    except AssistantError:
        return None


def _build_from_files(what: str, target: PreTrainedModel, make: Callable[[], T]) -> T:
    """Call `make`, report damage as `AssistantError`, and restore the target's `requires_grad`."""
    needs_gradient = [(weight, weight.requires_grad) for weight in target.parameters()]
    try:
        return make()
    except (AssistantError, UnsupportedError):
        raise
    except DAMAGE as error:
        raise AssistantError(f"{what} is damaged: {error}") from error
    finally:
        # Modules freeze the weights that they share with the target.
        for weight, needed in needs_gradient:
            weight.requires_grad_(needed)
