"""What `assistant=` may be, for strategies that draft with a second language model."""

from __future__ import annotations

import os
from weakref import WeakKeyDictionary

from transformers import AutoModelForCausalLM, PreTrainedModel

from hf_spec.checks import check_model
from hf_spec.errors import AssistantError, SpecError

# Loading takes seconds; a name given in every call is loaded once per target model.
_LOADED: WeakKeyDictionary[PreTrainedModel, dict[str, PreTrainedModel]] = WeakKeyDictionary()


def resolve_draft_model(
    strategy: str, assistant: object, target: PreTrainedModel
) -> PreTrainedModel:
    """The draft model that `assistant` stands for, checked against the target.

    Args:
        strategy: name used in messages.
        assistant: a model, a PEFT model, a folder or a Hub id.
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


def _load(name: str, target: PreTrainedModel) -> PreTrainedModel:
    loaded = _LOADED.setdefault(target, {})
    if name not in loaded:
        try:
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=target.dtype, use_safetensors=True, device_map={"": target.device}
            )
        except Exception as error:
            raise AssistantError(f"assistant={name!r} cannot be loaded: {error}") from error
        loaded[name] = model.eval()
    return loaded[name]
