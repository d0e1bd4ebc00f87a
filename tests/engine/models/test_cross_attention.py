"""Additional arguments of decoders with cross-attention, and detection of such models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from hf_spec.common.compat import CACHE_NAME
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.models.cross_attention import (
    CrossAttention,
    attends_to_encoder,
    decoding_parts,
    is_lone_decoder,
    num_layers,
    takes_positions,
)
from hf_spec.engine.runner import ModelRunner
from tests.refusals import t5
from tests.targets.whisper_cases import FRAMES, build, decoder_alone, sound
from tests.tiny_models import build as build_text


@pytest.mark.parametrize("make", [build, decoder_alone])
def test_arguments_have_the_names_of_the_model(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    cross = CrossAttention(model, torch.zeros(1, FRAMES // 2, 32), DynamicCache())
    names = {"input_ids", "attention_mask", "position_ids"}
    given = cross.arguments({**dict.fromkeys(names), "return_dict": True})
    expected = {f"decoder_{name}" for name in names} if model.config.is_encoder_decoder else names
    assert set(given) == {*expected, "return_dict", "encoder_outputs", CACHE_NAME}


def test_what_models_are() -> None:
    whole, part, text = build(), decoder_alone(), build_text("llama")
    assert [attends_to_encoder(m) for m in (whole, part, text, t5())] == [True, True, False, False]
    assert [is_lone_decoder(m) for m in (whole, part, text)] == [False, True, False]
    assert [takes_positions(m) for m in (whole, part, text, t5())] == [True, True, True, False]
    assert [num_layers(m) for m in (whole, part, text)] == [3, 2, 3]
    assert decoding_parts(text) == [text]
    encoder = set(whole.get_encoder().modules())
    run = {module for top in decoding_parts(whole) for module in top.modules()}
    assert not encoder & run
    assert whole.get_output_embeddings() in run


def test_a_forward_is_that_of_the_model() -> None:
    """Two rows of different lengths have their own audio; the second forward pass has branches."""
    model = build()
    with torch.no_grad():
        states = model.get_encoder()(sound(2)).last_hidden_state
        runner = ModelRunner(model, 2)
        runner.attend_to(states)
        begun, texts = [[71, 4], [71]], [[71, 4, 9, 12], [71, 8]]
        trees = [([12, 20, 30, 31], [-1, 0, 0, 1]), ([8, 21], [-1, 0])]
        with runner.active():
            runner.forward(DraftTree.from_rows([([4], [-1]), ([71], [-1])]), begun)
            runner.keep([[], []])
            output = runner.forward(DraftTree.from_rows(trees), texts)
        paths = [([12], 0), ([12, 20], 0), ([12, 30], 0), ([12, 20, 31], 0), ([8], 1), ([8, 21], 1)]
        for node, (path, row) in enumerate(paths):
            whole = torch.tensor([texts[row][:-1] + path])
            plain = model(sound(2)[row : row + 1], decoder_input_ids=whole).logits[0, -1]
            torch.testing.assert_close(output.logits[node], plain, atol=1e-4, rtol=1e-4)
