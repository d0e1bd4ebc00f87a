"""What `assistant=` may be: a second language model, or an adapter of a method."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_spec.models.methods  # noqa: F401 - the methods become known
from hf_spec.adapters.adapter import PEFT_TYPE, WEIGHTS_NAME
from hf_spec.adapters.folder import SpecAdapter, active_adapters, is_adapter, load_adapter
from hf_spec.adapters.hub import Place
from hf_spec.data.hub import load_named
from hf_spec.errors import AssistantError, HubError, OptionError, SpecError, UnsupportedError
from hf_spec.execution.cross_attention import attends_to_encoder, is_lone_decoder
from hf_spec.execution.model_checks import check_decoder
from hf_spec.execution.per_model import made_once
from hf_spec.execution.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.models.falcon_head import METHOD as FALCON
from hf_spec.models.falcon_head import FalconHead
from hf_spec.models.trained_draft import METHOD as DRAFT

Made = TypeVar("Made")

# What code raises that was made for right options and weights and is given others.
DAMAGE = (OptionError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError)


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """The draft model that `assistant` stands for, checked against the target.

    That is a model, a PEFT model, a `SpecAdapter`, or a folder or Hub id of a model or of a draft
    adapter. Messages name the `strategy`.

    Raises:
        AssistantError: if it is missing, cannot be loaded, or has another vocabulary.
    """
    if assistant is None:
        raise AssistantError(
            f"spec_strategy={strategy!r} needs a draft model: pass assistant=<model, folder or Hub "
            "id>, for instance hf_spec.truncated_draft(model, num_layers)"
        )
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)
        assistant = read_once(target, DRAFT, name, lambda: _load(name, target))
    elif isinstance(assistant, SpecAdapter):
        assistant = adapter_module(assistant, DRAFT, target)
    unwrap = getattr(assistant, "get_base_model", None)
    model = unwrap() if callable(unwrap) else assistant
    if not isinstance(model, PreTrainedModel):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is no draft model; pass a "
            "PreTrainedModel, a PeftModel, a folder or a Hub id"
        )
    try:
        check_decoder(model)
        _check_encoder(model, target)
    except SpecError as error:
        raise AssistantError(f"the assistant cannot draft: {error}") from error
    sizes = [num_embeddings(m) for m in (target, model)]
    if abs(sizes[0] - sizes[1]) > PADDED_ROWS:
        raise AssistantError(
            f"the assistant's vocabulary has {sizes[1]} tokens, the target's {sizes[0]}, more than "
            "padding explains; drafts need the target's own tokenizer, so choose a model of the "
            "same family"
        )
    return model


def _check_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Refuse draft models that attend to the output of an encoder and would have none."""
    if not attends_to_encoder(draft):
        return
    names = type(draft).__name__, type(target).__name__
    if not target.config.is_encoder_decoder:
        raise UnsupportedError(f"{names[0]} needs the output of an encoder; {names[1]} has none")
    # By itself it reads what the target's encoder gives, otherwise what that encoder is given.
    read = "d_model" if is_lone_decoder(draft) else "num_mel_bins"
    sizes = [getattr(model.config, read) for model in (draft, target)]
    if sizes[0] != sizes[1]:
        raise UnsupportedError(
            f"{names[0]} has {read} {sizes[0]}, and {names[1]} has {sizes[1]}, so it cannot read "
            "the same sound"
        )


def resolve_falcon_head(assistant: object, target: PreTrainedModel) -> FalconHead:
    """The head that `assistant` is, or that of a Falcon adapter, its folder or Hub id."""
    if isinstance(assistant, (str, os.PathLike, SpecAdapter)):
        head: FalconHead = adapter_module(assistant, FALCON, target)
        return head
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


def read_once(target: PreTrainedModel, method: str, name: str, read: Callable[[], Made]) -> Made:
    """What `read` gives for the adapter in a folder or repository, kept as by `made_once`.

    It is read again if the weights in the folder, or the target's device or dtype, have changed.
    """
    weights = Path(name) / WEIGHTS_NAME
    stamp = weights.stat().st_mtime_ns if weights.is_file() else None
    return made_once(target, (method, name, stamp, target.device, target.dtype), read)


def adapter_module(
    assistant: str | os.PathLike[str] | SpecAdapter, method: str, target: PreTrainedModel
) -> Any:
    """What an adapter of `method`, or the one in a folder or repository, adds to `target`."""
    if isinstance(assistant, SpecAdapter):
        if assistant.method != method:
            raise AssistantError(
                f"the adapter is one of method {assistant.method!r}, not {method!r}"
            )
        return build(assistant, target)
    name = os.fspath(assistant)
    return read_once(target, method, name, lambda: _build(load_adapter(name, method), target))


def build(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    """What `adapter` adds to `target`: a draft model, a classifier, a head or adaptive tokens.

    Made once, and again where the target has another device or dtype. An adapter that is damaged
    or belongs to another model is an `AssistantError`.
    """
    key = (adapter, target.device, target.dtype)
    return made_once(target, key, lambda: _build(adapter, target))


def find_assistant(assistant: Any, target: PreTrainedModel, methods: Collection[str] | None) -> Any:
    """What a strategy that can use adapters of `methods`, None for all, is given for `assistant=`.

    Returns:
        The adapter of a PEFT model that carries one; for None the one attached to the target,
        several as a list, or None; everything else as it is.

    Raises:
        AssistantError: if several adapters are attached to the target and the strategy uses one.
    """
    if isinstance(assistant, (list, tuple)):
        return [None if one is None else find_assistant(one, target, methods) for one in assistant]
    unwrap = getattr(assistant, "get_base_model", None)
    if callable(unwrap) and getattr(assistant, "peft_type", None) == PEFT_TYPE:
        return next(iter(active_adapters(unwrap())), assistant)
    if assistant is not None:
        return assistant
    fitting = [a for a in active_adapters(target) if methods is None or a.method in methods]
    if len(fitting) > 1 and methods is not None and len(methods) == 1:
        raise AssistantError(
            f"{len(fitting)} adapters of method {fitting[0].method!r} are active on the model; "
            "choose one: model.set_adapter(name), or assistant="
        )
    return fitting if len(fitting) > 1 else next(iter(fitting), None)


def _build(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    method = adapter.record
    adapter.base.check(target)
    needs_gradient = [(weight, weight.requires_grad) for weight in target.parameters()]
    try:
        return method.build(adapter, target)
    except (AssistantError, UnsupportedError):
        raise
    except DAMAGE as error:
        raise AssistantError(
            f"the {adapter.method} adapter {str(adapter.folder or '')!r} is damaged: {error}"
        ) from error
    finally:
        # Modules freeze what they share with the target.
        for weight, needed in needs_gradient:
            weight.requires_grad_(needed)


def _load(name: str, target: PreTrainedModel) -> PreTrainedModel:
    if is_adapter(name):
        return _build(load_adapter(name, DRAFT), target)
    place = Place(name) if Path(name).exists() else Place.of(name)
    try:
        model = load_named(
            AutoModelForCausalLM,
            place.repo_id,
            revision=place.revision or "main",
            dtype=target.dtype,
            use_safetensors=True,
            device_map={"": target.device},
        )
    except HubError:
        raise
    except Exception as error:
        raise AssistantError(f"assistant={name!r} cannot be loaded: {error}") from error
    return model.eval()
