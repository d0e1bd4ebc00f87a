"""What `assistant=` may be: a second language model, or an adapter of a method."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.adapters.folder import WEIGHTS_NAME, is_adapter, load_adapter
from hf_spec.errors import AssistantError, SpecError
from hf_spec.model_checks import check_model
from hf_spec.models.falcon_head import METHOD as FALCON
from hf_spec.models.falcon_head import FalconHead
from hf_spec.models.trained_draft import METHOD, draft_from_adapter

Made = TypeVar("Made")

_MADE: WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = WeakKeyDictionary()


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """The draft model that `assistant` stands for, checked against the target.

    Args:
        strategy: name used in messages.
        assistant: a model, a PEFT model, a folder or a Hub id, of a model or of a draft adapter.
        target: the model that generates.

    Raises:
        AssistantError: if it is missing, cannot be loaded, or has another vocabulary.
    """
    if assistant is None:
        raise AssistantError(
            f"spec_strategy={strategy!r} needs a draft model: pass assistant=<model, folder or Hub "
            "id>, for instance hf_spec.truncated_draft(model, num_layers)"
        )
    if isinstance(assistant, (str, os.PathLike)):
        assistant = _load(os.fspath(assistant), target)
    unwrap = getattr(assistant, "get_base_model", None)
    model = unwrap() if callable(unwrap) else assistant
    if not isinstance(model, PreTrainedModel):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is no draft model; pass a "
            "PreTrainedModel, a PeftModel, a folder or a Hub id"
        )
    try:
        check_model(model)
    except SpecError as error:
        raise AssistantError(f"the assistant cannot draft: {error}") from error
    sizes = [m.config.get_text_config().vocab_size for m in (target, model)]
    if sizes[0] != sizes[1]:
        raise AssistantError(
            f"the assistant's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}; "
            "drafts need the target's own tokenizer, so choose a model of the same family"
        )
    return model


def resolve_falcon_head(assistant: object, target: PreTrainedModel) -> FalconHead:
    """The Falcon head that `assistant` stands for, checked against the target.

    Args:
        assistant: a head, or a folder or Hub id of a Falcon adapter.
        target: the model that generates.

    Raises:
        AssistantError: if it is none, cannot be loaded, or belongs to another model.
    """
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)
        return read_once(
            target,
            FALCON,
            name,
            lambda: FalconHead.from_adapter(load_adapter(name, FALCON), target),
        )
    if not isinstance(assistant, FalconHead):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is no Falcon head; pass the folder or "
            "Hub id of a Falcon adapter, made by `hf-spec train falcon`, or a FalconHead"
        )
    assistant.base.check(target)
    if assistant.training:
        raise AssistantError("the Falcon head is in training mode; call eval() on it")
    place, other = assistant.attention.device, target.device
    if place != other:
        raise AssistantError(
            f"the Falcon head is on {place}, the model on {other}; move the head there"
        )
    return assistant


def made_once(target: PreTrainedModel, key: Hashable, make: Callable[[], Made]) -> Made:
    """What `make` gives for `target`, kept as long as the target lives.

    Args:
        target: the model that generates.
        key: what tells this thing from others of the same target.
        make: called the first time.
    """
    known = _MADE.setdefault(target, {})
    if key not in known:
        known[key] = make()
    return known[key]


def read_once(target: PreTrainedModel, method: str, name: str, read: Callable[[], Made]) -> Made:
    """What `read` gives for the adapter `name` of a method; read anew if its weights changed.

    Args:
        target: the model that generates; for another device or dtype of it `read` is called anew.
        method: of the adapter.
        name: folder or Hub id.
        read: called the first time.
    """
    weights = Path(name) / WEIGHTS_NAME
    stamp = weights.stat().st_mtime_ns if weights.is_file() else None
    return made_once(target, (method, name, stamp, target.device, target.dtype), read)


def _load(name: str, target: PreTrainedModel) -> PreTrainedModel:
    def make() -> PreTrainedModel:
        return _from_adapter(name, target) if is_adapter(name) else _model(name, target)

    return read_once(target, METHOD, name, make)


def _from_adapter(name: str, target: PreTrainedModel) -> PreTrainedModel:
    return draft_from_adapter(load_adapter(name, METHOD), target)


def _model(name: str, target: PreTrainedModel) -> PreTrainedModel:
    try:
        model = AutoModelForCausalLM.from_pretrained(
            name, dtype=target.dtype, use_safetensors=True, device_map={"": target.device}
        )
    except Exception as error:
        raise AssistantError(f"assistant={name!r} cannot be loaded: {error}") from error
    return model.eval()
