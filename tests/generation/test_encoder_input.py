"""Input of encoder-decoder models: names of arguments, and the encoder of a draft model."""

from __future__ import annotations

import torch

from hf_spec.engine.runner import ModelRunner
from hf_spec.generation import encoder_input
from hf_spec.generation.encoder_input import decoder_kwargs, read_input
from hf_spec.generation.own_prefill import Prompt
from tests.targets.whisper_cases import build, own_encoder, sound
from tests.tiny_models import build as build_text

GIVEN = {"inputs": 1, "attention_mask": 2, "decoder_attention_mask": 3, "use_cache": True}


def test_the_names_of_other_models() -> None:
    assert decoder_kwargs(build(), GIVEN) == {"attention_mask": 3, "use_cache": True}
    assert decoder_kwargs(build_text("llama"), GIVEN) == GIVEN


def test_what_a_draft_model_with_an_encoder_reads() -> None:
    """The number of rows may be a multiple of the number of recordings."""
    ids = torch.zeros(4, 1, dtype=torch.long)
    prompt = Prompt(ids, torch.ones_like(ids), {})
    read = read_input({"inputs": sound(2)}, own_encoder(), prompt)
    expected = build().get_encoder()(sound(2))[0].repeat_interleave(2, dim=0)
    torch.testing.assert_close(read.model_kwargs["encoder_outputs"][0], expected)


def test_a_text_model_hears_nothing() -> None:
    """A text draft model gets no encoder output; it drafts from the text alone."""
    ids = torch.zeros(1, 1, dtype=torch.long)
    runner = ModelRunner(build_text("llama"), 1)
    prompt = Prompt(ids, torch.ones_like(ids), {"encoder_outputs": (torch.zeros(1, 20, 32),)})
    encoder_input._attend(runner, build(), prompt)
    assert runner._call.cross_attention is None
