"""What `assistant=` may be: a second language model, an adapter, or a published head."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PreTrainedModel

import hf_spec.methods.adapter_methods
import hf_spec.methods.head_families  # noqa: F401 - registers the families of heads
from hf_spec.adapters.adapter import PEFT_TYPE, BaseModel
from hf_spec.adapters.folder import SpecAdapter, active_adapters, is_adapter, load_adapter
from hf_spec.adapters.hub import Place
from hf_spec.adapters.published import (
    MODELS,
    PublishedHead,
    family_record,
    published_family,
    read_published,
)
from hf_spec.common.errors import AssistantError, HubError, OptionError, SpecError, UnsupportedError
from hf_spec.common.hub import load_named
from hf_spec.engine.forward.model_cache import cached_per_model
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.engine.models.cross_attention import attends_to_encoder, is_lone_decoder
from hf_spec.engine.models.support_checks import check_model
from hf_spec.methods.draft_model.trained import METHOD as DRAFT
from hf_spec.methods.draft_model.truncated import named_layers, truncated_draft
from hf_spec.methods.falcon.head import METHOD as FALCON
from hf_spec.methods.falcon.head import FalconHead

Made = TypeVar("Made")

# What code raises that was made for right options and weights and is given others.
DAMAGE = (
    OptionError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
    # Of transformers' configs, which check their values.
    StrictDataclassError,
)


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """The draft model that `assistant` stands for, checked against the target.

    That is a model, a PEFT model, a `SpecAdapter`, or a folder or Hub id of a model or of a draft
    adapter. Messages name the `strategy`.

    Raises:
        AssistantError: if it is missing, cannot be loaded, or has another vocabulary.
    """
    model = read_draft_model(strategy, assistant, target)
    if not has_targets_size(model, target):
        raise AssistantError(
            f"the assistant's vocabulary has {num_embeddings(model)} tokens, the target's "
            f"{num_embeddings(target)}, more than padding explains; choose a model of the same "
            "family, or give generate() both tokenizers: tokenizer=, assistant_tokenizer="
        )
    return model


def has_targets_size(model: PreTrainedModel, target: PreTrainedModel) -> bool:
    """Whether two vocabularies differ in size by no more than padding does."""
    return abs(num_embeddings(model) - num_embeddings(target)) <= PADDED_ROWS


def read_draft_model(strategy: str, assistant: object, target: PreTrainedModel) -> PreTrainedModel:
    """As `resolve_draft_model`, of any vocabulary."""
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
        check_model(model)
        _check_encoder(model, target)
    except SpecError as error:
        raise AssistantError(f"the assistant cannot draft: {error}") from error
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


def resolve_published(
    strategy: str,
    assistant: object,
    target: PreTrainedModel,
    kinds: Collection[str],
    reading: tuple[tuple[str, Any], ...] = (),
) -> Any:
    """What a strategy works with, made of the published head that `assistant` stands for.

    That is its folder or Hub id, a `PublishedHead`, or what a builder of a family in `kinds` has
    made: its attributes `strategy` and `base` say what for. Messages name the `strategy`;
    `reading` is what the user says of the files against their config.

    Raises:
        AssistantError: if it is missing, damaged, of another family, or for another target.
        OptionError: if there is a `reading` of what has been made already.
    """
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)

        def read() -> Any:
            head = _checked(read_published(name), name, strategy, kinds)
            return build_published(replace(head, reading=reading), target)

        return read_once(target, (strategy, reading), name, read)
    if isinstance(assistant, PublishedHead):
        head = _checked(assistant, assistant.name, strategy, kinds)
        read_so = replace(head, reading=reading or head.reading)
        key = (head, read_so.reading, target.device, target.dtype)
        return cached_per_model(target, key, lambda: build_published(read_so, target))
    if assistant is not None and getattr(assistant, "strategy", None) == strategy:
        if reading:
            raise OptionError(
                f"{', '.join(name for name, _ in reading)} say how the files of a head are read, "
                f"and this {type(assistant).__name__} was made of them before; pass "
                "assistant=<folder or Hub id>, or leave them out"
            )
        _check_built(assistant, target)
        return assistant
    raise AssistantError(
        f"spec_strategy={strategy!r} needs a published head: pass assistant=<folder or Hub id>; "
        f"got {type(assistant).__name__}"
    )


def _check_built(head: Any, target: PreTrainedModel) -> None:
    """Refuse a head that was built for another target than `target`."""
    if (difference := head.base.difference(BaseModel.of(target))) is not None:
        raise AssistantError(
            f"this {type(head).__name__} was built for {difference}: build it for this model, or "
            "pass its folder or Hub id as assistant="
        )


def resolve_inside(strategy: str, target: PreTrainedModel, make: Callable[[], Made]) -> Made:
    """What a strategy makes of more weights in the files that `target` was loaded from."""
    name = target.name_or_path or ""
    what = f"the module for {strategy!r} in {name!r}"
    return read_once(target, strategy, name, lambda: _made(what, target, make))


def strategy_of(name: str) -> str:
    """The strategy that an adapter, a published head or a model is for; "tree" for a model."""
    if is_adapter(name):
        return load_adapter(name).strategy
    family = _family_of(name)
    return "tree" if family is None else family_record(family, name).strategy


def read_once(
    target: PreTrainedModel, method: Hashable, name: str, read: Callable[[], Made]
) -> Made:
    """What `read` gives for the adapter in a folder or repository, kept as by `cached_per_model`.

    It is read again if weights or configs in the folder, or the target's device or dtype, have
    changed.
    """
    folder = Path(name)
    kinds = ("*.safetensors", "*.json") if folder.is_dir() else ()
    files = sorted(file for kind in kinds for file in folder.glob(kind))
    stamp = tuple((file.name, file.stat().st_mtime_ns) for file in files if file.is_file())
    return cached_per_model(target, (method, name, stamp, target.device, target.dtype), read)


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
    if Path(name).is_dir() and not is_adapter(name):
        _refuse_head(name, "no adapter")
    return read_once(target, method, name, lambda: _build(load_adapter(name, method), target))


def build(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    """What `adapter` adds to `target`: a draft model, a classifier, a head or adaptive tokens.

    Made once, and again where the target has another device or dtype. An adapter that is damaged
    or belongs to another model is an `AssistantError`.
    """
    key = (adapter, target.device, target.dtype)
    return cached_per_model(target, key, lambda: _build(adapter, target))


def find_assistant(assistant: Any, target: PreTrainedModel, methods: Collection[str] | None) -> Any:
    """What a strategy that can use adapters of `methods`, None for all, is given for `assistant=`.

    Returns:
        The adapter of a PEFT model that carries one; for None the one attached to the target,
        several as a list, or None; for "truncated:N" the target's own first N layers, made once;
        everything else as it is.

    Raises:
        AssistantError: if several adapters are attached to the target and the strategy uses one.
        OptionError: if the target has no N layers to cut off.
    """
    if isinstance(assistant, (list, tuple)):
        return [None if one is None else find_assistant(one, target, methods) for one in assistant]
    unwrap = getattr(assistant, "get_base_model", None)
    if callable(unwrap) and getattr(assistant, "peft_type", None) == PEFT_TYPE:
        return next(iter(active_adapters(unwrap())), assistant)
    if isinstance(assistant, str) and not assistant.strip():
        raise AssistantError(f"assistant={assistant!r} names nothing; give a folder or a Hub id")
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


def _build(adapter: SpecAdapter, target: PreTrainedModel) -> Any:
    method = adapter.record
    adapter.base.check(target)
    what = f"the {adapter.method} adapter {str(adapter.folder or '')!r}"
    return _made(what, target, lambda: method.build(adapter, target))


def build_published(head: PublishedHead, target: PreTrainedModel) -> Any:
    """What a published head is to `target`; an `AssistantError` if it is damaged."""
    what = f"the {head.family} head {head.name!r}"
    return _made(what, target, lambda: head.record.build(head, target))


def _made(what: str, target: PreTrainedModel, make: Callable[[], Made]) -> Made:
    """What `make` gives from files that may be damaged; the target is left as it is."""
    needs_gradient = [(weight, weight.requires_grad) for weight in target.parameters()]
    try:
        return make()
    except (AssistantError, UnsupportedError):
        raise
    except DAMAGE as error:
        raise AssistantError(f"{what} is damaged: {error}") from error
    finally:
        # Modules freeze what they share with the target.
        for weight, needed in needs_gradient:
            weight.requires_grad_(needed)


def _checked(
    head: PublishedHead | None, name: str, strategy: str, kinds: Collection[str]
) -> PublishedHead:
    if head is None:
        raise AssistantError(
            f"assistant={name!r} is no published head; spec_strategy={strategy!r} uses heads of "
            f"the families {', '.join(sorted(kinds))}, and 'draft' or 'tree' a whole model"
        )
    if head.family not in kinds:
        raise AssistantError(
            f"assistant={name!r} is a head of the family {head.family!r}: use "
            f"spec_strategy={head.record.strategy!r}"
        )
    return head


def _family_of(name: str) -> str | None:
    """The family of the published head in a folder or repository; what cannot be read has none."""
    try:
        return published_family(name)
    except AssistantError:
        return None


def _refuse_head(name: str, other: str) -> None:
    """Refuse a published head where something `other` is wanted."""
    family = _family_of(name)
    if family is not None and family not in MODELS:
        strategy = family_record(family, name).strategy
        raise AssistantError(
            f"assistant={name!r} is a head of the family {family!r}, {other}: use "
            f"spec_strategy={strategy!r}"
        )


def _load(name: str, target: PreTrainedModel) -> PreTrainedModel:
    if is_adapter(name):
        return _build(load_adapter(name, DRAFT), target)
    _refuse_head(name, "no draft model")
    place = Place(name) if Path(name).exists() else Place.of(name)
    try:
        model = load_named(
            AutoModelForCausalLM,
            place.repo_id,
            revision=place.revision or "main",
            dtype=target.dtype,
            use_safetensors=True,
            # Left open, transformers would ask on the terminal whether to run a model's own code.
            trust_remote_code=False,
            device_map={"": target.device},
        )
    except HubError:
        raise
    except Exception as error:
        raise AssistantError(f"assistant={name!r} cannot be loaded: {error}") from error
    return model.eval()
