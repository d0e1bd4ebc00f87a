"""Block heads without a runner: embeddings, dtype and logits."""

from __future__ import annotations

from dataclasses import replace

import torch

from hf_spec.methods.block.layouts import build_block_head
from tests.feature_reference import LAYERS, MASK, SIZE, dflash
from tests.methods.block.test_layouts import changed
from tests.tiny_models import build

MODEL = build("llama")


def test_an_embedding_that_the_target_scales_is_read_raw() -> None:
    """Gemma's embedding module multiplies by the square root of the hidden size."""
    model = build("gemma3")
    table = model.get_input_embeddings()
    tokens = torch.tensor([5, MASK])
    assert torch.equal(build_block_head(dflash(), model).embed(tokens), table.weight[tokens])
    # A scale from the config, and one that overrides the config.
    scaled = changed(dflash(), input_embedding_scale=SIZE**0.5)
    against = replace(scaled, overrides=(("embedding_scale", 3.0),))
    assert torch.allclose(build_block_head(scaled, model).embed(tokens), table(tokens), rtol=1e-3)
    assert torch.equal(build_block_head(against, model).embed(tokens), table.weight[tokens] * 3)


def test_logits_may_be_scaled_and_squashed() -> None:
    outputs = torch.randn(3, SIZE)
    plain = build_block_head(dflash(), MODEL).logits(outputs)
    inner = {**dflash().config["dflash_config"], "output_multiplier": 0.5}
    other = changed(dflash(), dflash_config=inner, final_logit_softcapping=2.0)
    assert torch.allclose(build_block_head(other, MODEL).logits(outputs), 2 * (plain / 4).tanh())


def test_heads_of_a_float16_target_compute_in_bfloat16() -> None:
    half = type(MODEL)(MODEL.config).to(torch.float16)
    head = build_block_head(dflash(), half)
    assert head.dtype is torch.bfloat16
    # Sums of these states overflow float16.
    states = torch.full((2, SIZE), 6e4, dtype=torch.float16)
    assert head.context([states] * len(LAYERS)).isfinite().all()
    assert head.logits(torch.ones(1, SIZE, dtype=torch.bfloat16)).isfinite().all()
    assert {p.dtype for p in half.parameters()} == {torch.float16}
