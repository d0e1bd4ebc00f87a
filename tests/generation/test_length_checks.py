"""Lengths from which on a model computes otherwise than draft trees do."""

from __future__ import annotations

import pytest
import torch

from tests import any_class
from tests.refusals import PROMPT, refuse, small_llama

INDEXED = {
    "deepseek_v32": "DeepseekV32ForCausalLM",
    # Of its layers some take the choice of an earlier one.
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
}


def test_rotary_scaling_that_depends_on_the_length() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = small_llama(rope_parameters=rope, max_position_embeddings=32)
    refuse("rope_type='dynamic' .* past 32 tokens", model=model, max_new_tokens=30)
    model.generate(PROMPT, max_new_tokens=4, spec_strategy="lookup")


@pytest.mark.parametrize("kind", INDEXED)
def test_an_index_that_leaves_tokens_out(kind: str) -> None:
    model = any_class.build(kind, INDEXED[kind])
    assert model.config.get_text_config().index_topk == 64
    room = 64 - PROMPT.shape[1]
    refuse("no more than 64 tokens", model=model, max_new_tokens=room + 1)
    call = {"max_new_tokens": room, "do_sample": False}
    plain = model.generate(PROMPT, **call)
    assert torch.equal(model.generate(PROMPT, **call, spec_strategy="lookup"), plain)
