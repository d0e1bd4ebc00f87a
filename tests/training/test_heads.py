"""Training code shared by published heads; the tests of each method run complete trainings."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec.methods.published_weights import draft_vocab_ids
from hf_spec.training.heads import (
    draft_vocab_tensors,
    falling_weights,
    layer_config,
    speculators_config,
)


def test_the_draft_vocabulary_is_read_back() -> None:
    ids = torch.tensor([2, 5, 6, 40])
    tensors = draft_vocab_tensors(ids, 50)
    found = draft_vocab_ids("a head", tensors["d2t"], 4, 50)
    assert found is not None
    assert torch.equal(found, ids)
    assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert draft_vocab_tensors(None, 50) == {}


def test_weights_fall_and_sum_to_one() -> None:
    weights = falling_weights(0.5, 3)
    assert weights == pytest.approx([4 / 7, 2 / 7, 1 / 7])


def test_layers_have_the_sizes_of_the_target(model: PreTrainedModel) -> None:
    sizes = layer_config(model, None, 2)
    assert (sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]) == (32, 64, 8)
    assert (sizes["num_attention_heads"], sizes["num_key_value_heads"]) == (4, 2)
    assert sizes["num_hidden_layers"] == 2
    assert layer_config(model, 24, 1)["intermediate_size"] == 24


def test_engines_find_the_target_and_the_draft_length(model: PreTrainedModel) -> None:
    config = speculators_config("dflash", model, 7)
    assert config["speculators_model_type"] == "dflash"
    inner = config["speculators_config"]
    assert inner["proposal_methods"][0]["speculative_tokens"] == 7
    assert inner["verifier"]["architectures"] == ["LlamaForCausalLM"]
