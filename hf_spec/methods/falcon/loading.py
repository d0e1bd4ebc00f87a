"""Loads Falcon heads: a head object, an adapter, or the adapter's folder or Hub id."""

from __future__ import annotations

import os

from transformers import PreTrainedModel

from hf_spec.adapters.folder import SpecAdapter
from hf_spec.common.errors import AssistantError
from hf_spec.methods.falcon.head import METHOD, FalconHead
from hf_spec.methods.loading import adapter_module


def resolve_falcon_head(assistant: object, target: PreTrainedModel) -> FalconHead:
    """Return the Falcon head for `assistant`, checked against the target.

    Raises:
        AssistantError: if it is not a Falcon head, is for another model, is on another device, or
            is in training mode.
    """
    if isinstance(assistant, (str, os.PathLike, SpecAdapter)):
        head: FalconHead = adapter_module(assistant, METHOD, target)
        return head
    if not isinstance(assistant, FalconHead):
        raise AssistantError(
            f"assistant of type {type(assistant).__name__} is not a Falcon head; pass the folder "
            "or Hub id of a Falcon adapter, made by `hf-spec train falcon`, or a FalconHead"
        )
    assistant.base.check(target)
    if assistant.training:
        raise AssistantError("the Falcon head is in training mode; call eval() on it")
    device = assistant.attention.device
    if device != target.device:
        raise AssistantError(
            f"the Falcon head is on {device}, the model on {target.device}; move the head there"
        )
    return assistant
