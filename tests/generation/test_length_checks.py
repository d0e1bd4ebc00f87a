"""Lengths from which on a model computes otherwise than draft trees do."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GenerationConfig, MiniMaxM3VLForCausalLM, PreTrainedModel

from tests import any_class
from tests.refusals import PROMPT, refuse, small_llama


def test_rotary_scaling_that_depends_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = small_llama(rope_parameters=rope, max_position_embeddings=32)
    refuse("rope_type='dynamic' .* past 32 tokens", model=model, max_new_tokens=30)
    model.generate(PROMPT, max_new_tokens=4, spec_strategy="lookup")


def indexed_by_blocks() -> PreTrainedModel:
    """Of 4 tokens each; an index may choose 16 of them."""
    config = any_class.build("minimax_m3_vl_text", "MiniMaxM3VLForCausalLM").config
    assert "minimax_m3_sparse" in config.layer_types
    config = copy.deepcopy(config)
    config.index_block_size = 4
    torch.manual_seed(0)
    model = MiniMaxM3VLForCausalLM(config).eval()
    model.generation_config = GenerationConfig(pad_token_id=0)
    return model


@pytest.mark.parametrize("kind", ["tokens", "blocks"])
def test_an_index_that_leaves_tokens_out(kind: str) -> None:
    by_tokens = any_class.build("deepseek_v32", "DeepseekV32ForCausalLM")
    model = by_tokens if kind == "tokens" else indexed_by_blocks()
    room = 64 - PROMPT.shape[1]
    refuse("no more than 64 tokens", model=model, max_new_tokens=room + 1)
    call = {"max_new_tokens": room, "do_sample": False}
    plain = model.generate(PROMPT, **call)
    assert torch.equal(model.generate(PROMPT, **call, spec_strategy="lookup"), plain)
