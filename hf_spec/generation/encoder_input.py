"""Input of encoder-decoder models.

`generate()` runs the encoder before it calls the engine. The decoder's prompt is text like that of
other models, in arguments whose names begin with `decoder_`. Target and draft models get the output
of the encoder once, before the first forward pass of the decoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.backend.device.placement import execution_device
from hf_spec.common.compat import find_cache
from hf_spec.common.errors import AssistantError
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.models.cross_attention import DECODER_NAMES, attends_to_encoder, is_lone_decoder
from hf_spec.engine.runner import ModelRunner
from hf_spec.generation.own_prefill import Prompt

# Inputs of the encoder. Cross attention has no mask: audio is padded with silence.
ENCODER_INPUTS = {"inputs", "input_features", "attention_mask", "encoder_outputs"}


def decoder_kwargs(model: PreTrainedModel, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the decoder's arguments under the names that decoder-only models use."""
    if not model.config.is_encoder_decoder:
        return dict(arguments)
    usual_names = {decoder_name: name for name, decoder_name in DECODER_NAMES.items()}
    return {
        usual_names.get(name, name): value
        for name, value in arguments.items()
        if name not in ENCODER_INPUTS
    }


def share_encoder_output(target: ModelRunner, drafter: Drafter, prompt: Prompt) -> None:
    """Pass the encoder's output, in `prompt`, to the decoders of target and draft models."""
    states = prompt.model_kwargs["encoder_outputs"][0]
    cache = find_cache(prompt.model_kwargs)
    target.attend_to(states, getattr(cache, "cross_attention_cache", None))
    drafter.visit_runner(partial(_attend, target=target.model, prompt=prompt))


def _attend(runner: ModelRunner, target: PreTrainedModel, prompt: Prompt) -> None:
    """Pass the output on; a decoder without encoder uses the target's."""
    draft: Any = runner.model
    if not attends_to_encoder(draft):
        return
    shares = is_lone_decoder(draft) or draft.get_encoder() is target.get_encoder()
    draft_prompt = prompt if shares or prompt.read is None else prompt.read(draft, prompt)
    runner.attend_to(draft_prompt.model_kwargs["encoder_outputs"][0])


@torch.no_grad()
def read_input(arguments: Mapping[str, Any], draft: Any, prompt: Prompt) -> Prompt:
    """Return the prompt with the output of a draft model's own encoder, from the call's input.

    Raises `AssistantError` if the call has only the output of the target's encoder.
    """
    candidates = (arguments.get(name) for name in ("input_features", "inputs"))
    features = next((value for value in candidates if value is not None), None)
    if features is None:
        raise AssistantError(
            f"{type(draft).__name__} has an encoder of its own, but the call has only "
            "encoder_outputs; pass input_features, or load the assistant as a decoder "
            "(AutoModelForCausalLM), which shares the target's encoder"
        )
    encoder = draft.get_encoder()
    states = encoder(features.to(execution_device(encoder), draft.dtype))[0]
    copies = len(prompt.input_ids) // len(states)
    return replace(prompt, model_kwargs={"encoder_outputs": (states.repeat_interleave(copies, 0),)})
