"""Encoder-decoders: their arguments told as those of other models, and who hears the encoder.

`generate()` has run the encoder by the time that the engine is called. The decoder's prompt is text
like any other, under names that begin with `decoder_`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import find_cache
from hf_spec.common.errors import AssistantError
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.forward.runner import ModelRunner
from hf_spec.engine.models.cross_attention import DECODER_NAMES, attends_to_encoder, is_lone_decoder
from hf_spec.generation.own_prefill import Prompt

# What the encoder reads. A cross attention does not see its mask: sound is padded with silence.
ENCODER_INPUTS = {"inputs", "input_features", "attention_mask", "encoder_outputs"}


def decoder_kwargs(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call without those of the encoder, named as for decoder-only models."""
    if not model.config.is_encoder_decoder:
        return dict(arguments)
    plain = {ours: name for name, ours in DECODER_NAMES.items()}
    return {
        plain.get(name, name): value
        for name, value in arguments.items()
        if name not in ENCODER_INPUTS
    }


def share_encoder_output(
    target: ModelRunner, drafter: Drafter, prompt: Prompt, read: Callable[..., Prompt] | None
) -> None:
    """Let the decoders of target and draft models attend to what the encoder made of the input.

    Args:
        target: runs the target.
        drafter: active.
        prompt: as `generate()` prepared it, with the encoder's output.
        read: called with a draft model that has an encoder of its own and the prompt, gives the
            prompt with the output of that encoder.
    """
    states = prompt.model_kwargs["encoder_outputs"][0]
    cache = find_cache(prompt.model_kwargs)
    target.attend_to(states, getattr(cache, "cross_attention_cache", None))
    drafter.prefill(partial(_attend, target=target.model, prompt=prompt, read=read))


def _attend(
    runner: ModelRunner,
    target: PreTrainedModel,
    prompt: Prompt,
    read: Callable[..., Prompt] | None,
) -> None:
    """Only draft models that attend to an encoder do; one alone takes the target's."""
    draft: Any = runner.model
    if not attends_to_encoder(draft):
        return
    shares = is_lone_decoder(draft) or draft.get_encoder() is target.get_encoder()
    mine = prompt if shares or read is None else read(draft, prompt)
    runner.attend_to(mine.model_kwargs["encoder_outputs"][0])


@torch.no_grad()
def read_input(given: Mapping[str, Any], draft: Any, prompt: Prompt) -> Prompt:
    """The prompt with what the encoder of a draft model makes of a call's input.

    Args:
        given: the arguments of the call.
        draft: the draft model.
        prompt: as the target reads it.
    """
    named = (given.get(name) for name in ("input_features", "inputs"))
    features = next((value for value in named if value is not None), None)
    if features is None:
        raise AssistantError(
            f"{type(draft).__name__} has an encoder of its own, and the call has encoder_outputs "
            "alone: give input_features, or load the assistant as a decoder by itself "
            "(AutoModelForCausalLM), which shares the target's encoder"
        )
    encoder = draft.get_encoder()
    states = encoder(features.to(execution_device(encoder), draft.dtype))[0]
    copies = len(prompt.input_ids) // len(states)
    return replace(prompt, model_kwargs={"encoder_outputs": (states.repeat_interleave(copies, 0),)})
