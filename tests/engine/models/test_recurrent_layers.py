"""Recurrent mixers in isolation: detection, updates of their state, and the cache."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from hf_spec.engine.models.recurrent_layers import (
    COMMITTED,
    Mixer,
    MixerCall,
    mixers_of,
    num_attention_layers,
    num_recurrent_layers,
    resumes,
    stateful_modules,
)
from hf_spec.engine.runner import ModelRunner
from tests import tiny_models
from tests.hybrid_models import HYBRIDS, MAMBA_1, PURE, build


@pytest.mark.parametrize("name", HYBRIDS)
def test_layers_are_counted_and_scans_are_tried_out(name: str) -> None:
    model = build(name)
    config = model.config.get_text_config()
    assert len(mixers_of(model)) == num_recurrent_layers(config) > 0
    assert (num_attention_layers(config) == 0) == (name in PURE)
    assert resumes(model) == (name not in MAMBA_1)


def test_attention_alone_has_no_mixers() -> None:
    model = tiny_models.build("llama")
    assert mixers_of(model) == []
    assert num_recurrent_layers(model.config) == 0
    assert num_attention_layers(model.config) == model.config.num_hidden_layers
    assert ModelRunner(model, 1)._mixers is None
    assert resumes(model)


@pytest.mark.parametrize("name", ["zaya", "minimax"])
def test_other_protocols_are_no_mixers(name: str) -> None:
    """A convolution whose mask has another name, and a model with another kind of cache."""
    config = AutoConfig.for_model(name, hidden_size=32, num_hidden_layers=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert mixers_of(model) == []
    assert bool(stateful_modules(model)) == (name == "zaya")
    assert num_recurrent_layers(config) > 0


@pytest.mark.parametrize("name", ["qwen3_5_text", "lfm2", "bamba", "mamba"])
@torch.no_grad()
def test_tokens_at_once_are_tokens_one_by_one(name: str) -> None:
    model = build(name)
    module = mixers_of(model)[0]
    inputs = torch.randn(2, 9, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    mixer = Mixer(module, num_rows=2, resumes=resumes(model))
    _, state = mixer.run(inputs[:, :3], None)
    before = [part.clone() for part in state]
    at_once, after = mixer.run(inputs[:, 3:], state)
    mixer.run(inputs[:, 3:4], state)
    # Some kernels write into their initial state.
    assert all(torch.equal(mine, other) for mine, other in zip(state, before, strict=True))
    for position in range(3, 9):
        output, state = mixer.run(inputs[:, position : position + 1], state)
        torch.testing.assert_close(output[:, 0], at_once[:, position - 3], atol=1e-4, rtol=1e-4)
    for mine, other in zip(state, after, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_state_goes_into_a_cache_and_comes_back() -> None:
    model = build("bamba")
    module = mixers_of(model)[1]
    mixer, other = (Mixer(module, num_rows=2, resumes=True) for _ in range(2))
    tokens = torch.randn(2, 5, model.config.hidden_size, generator=torch.Generator().manual_seed(2))
    _, state = mixer.run(tokens, None)
    mixer._commit(MixerCall.of([1, 0], [None, None], [[0], [0]], set()).rows, state)
    cache = DynamicCache(config=model.config)
    mixer.export(cache)
    other.load(cache.layers[mixer.index])
    for mine, theirs, part in zip(
        mixer.states[COMMITTED], other.states[COMMITTED], state, strict=True
    ):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine, part.flip(0))
    mixer.restart(0)
    assert not any(part[0].any() for part in mixer.states[COMMITTED])
