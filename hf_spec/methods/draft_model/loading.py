"""Loads draft models: a model object, a folder, a Hub id or an adapter of `hf-spec train draft`."""

from __future__ import annotations

import os
from pathlib import Path

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter, is_adapter, load_adapter
from hf_spec.adapters.hub import Place
from hf_spec.common.errors import AssistantError, HubError, SpecError, UnsupportedError
from hf_spec.common.hub import load_named
from hf_spec.engine.forward.vocabulary import PADDED_ROWS, num_embeddings
from hf_spec.engine.models.cross_attention import attends_to_encoder, is_lone_decoder
from hf_spec.engine.models.support_checks import check_model
from hf_spec.methods.draft_model.trained import METHOD
from hf_spec.methods.loading import adapter_module, build_adapter, read_once, reject_published


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """Return the draft model for `assistant`, checked against the target.

    Args:
        strategy: for messages.
        assistant: a model, a PEFT model, a `SpecAdapter`, or a folder or Hub id of a model or of a
            draft adapter.
        target: the target model.

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
    """Return True if the sizes of two vocabularies differ by no more than padding."""
    return abs(num_embeddings(model) - num_embeddings(target)) <= PADDED_ROWS


def read_draft_model(strategy: str, assistant: object, target: PreTrainedModel) -> PreTrainedModel:
    """Return the same as `resolve_draft_model` without the check of the vocabulary."""
    if assistant is None:
        raise AssistantError(
            f"spec_strategy={strategy!r} needs a draft model: pass assistant=<model, folder or Hub "
            "id>, for instance hf_spec.truncated_draft(model, num_layers)"
        )
    if isinstance(assistant, (str, os.PathLike)):
        name = os.fspath(assistant)
        assistant = read_once(target, METHOD, name, lambda: _load(name, target))
    elif isinstance(assistant, SpecAdapter):
        assistant = adapter_module(assistant, METHOD, target)
    unwrap = getattr(assistant, "get_base_model", None)
    model = unwrap() if callable(unwrap) else assistant
    if not isinstance(model, PreTrainedModel):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is not a draft model; pass a "
            "PreTrainedModel, a PeftModel, a folder or a Hub id"
        )
    try:
        check_model(model)
        _check_encoder(model, target)
    except SpecError as error:
        raise AssistantError(f"the assistant cannot draft: {error}") from error
    return model


def _check_encoder(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Reject a draft model that attends to an encoder output which the target cannot provide."""
    if not attends_to_encoder(draft):
        return
    draft_name, target_name = type(draft).__name__, type(target).__name__
    if not target.config.is_encoder_decoder:
        raise UnsupportedError(
            f"{draft_name} needs the output of an encoder; {target_name} has none"
        )
    # A decoder alone reads the target's encoder output; a whole model encodes the same input.
    size = "d_model" if is_lone_decoder(draft) else "num_mel_bins"
    draft_size, target_size = (getattr(model.config, size) for model in (draft, target))
    if draft_size != target_size:
        raise UnsupportedError(
            f"{draft_name} has {size} {draft_size}, and {target_name} has {target_size}, so it "
            "cannot read the same sound"
        )


def _load(name: str, target: PreTrainedModel) -> PreTrainedModel:
    if is_adapter(name):
        draft: PreTrainedModel = build_adapter(load_adapter(name, METHOD), target)
        return draft
    reject_published(name, "not a draft model")
    place = Place(name) if Path(name).exists() else Place.of(name)
    try:
        model = load_named(
            AutoModelForCausalLM,
            place.repo_id,
            revision=place.revision or "main",
            dtype=target.dtype,
            use_safetensors=True,
            # By default transformers asks on the terminal whether to run a model's own code.
            trust_remote_code=False,
            device_map={"": target.device},
        )
    except HubError:
        raise
    except Exception as error:
        raise AssistantError(f"assistant={name!r} cannot be loaded: {error}") from error
    return model.eval()
