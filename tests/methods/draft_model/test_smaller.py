"""Draft models with 4-bit weights and few tokens: shared weights and unchanged output."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import hf_spec
from hf_spec import AssistantError, OptionError
from hf_spec.methods.draft_model.smaller import smaller_model
from hf_spec.methods.feature_pairs.draft_head import FewTokensHead
from tests.tiny_models import VOCAB, build

FEW = 40
SMALLER = {"assistant_bits": 4, "draft_vocab_size": FEW}


@cache
def target() -> PreTrainedModel:
    """Return a model whose layers are as wide as a block of 4-bit weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.update(pad_token_id=0, eos_token_id=None)
    return model


@pytest.fixture
def draft() -> PreTrainedModel:
    pytest.importorskip("bitsandbytes")
    return copy.deepcopy(target())


def test_layers_are_quantized_and_the_rest_is_shared(draft: PreTrainedModel) -> None:
    before = {name: weight.clone() for name, weight in draft.named_parameters()}
    smaller: Any = smaller_model(draft, 4, None)
    layer, own = smaller.model.layers[0], draft.model.layers[0]
    assert type(layer.mlp.up_proj).__name__ == "Linear4bit"
    assert layer.mlp.up_proj.weight.dtype == torch.uint8
    assert layer.input_layernorm.weight is own.input_layernorm.weight
    assert smaller.get_input_embeddings().weight is draft.get_input_embeddings().weight
    assert smaller.get_output_embeddings().weight is draft.get_output_embeddings().weight
    # The model itself is unchanged.
    assert type(own.mlp.up_proj) is torch.nn.Linear
    assert all(torch.equal(weight, before[name]) for name, weight in draft.named_parameters())
    ids = torch.arange(3, 12)[None]
    difference = smaller(ids).logits - draft(ids).logits
    assert 0 < difference.norm() < 0.7 * draft(ids).logits.norm()


def test_few_tokens_are_drafted(draft: PreTrainedModel) -> None:
    draft.generation_config.eos_token_id = [5, VOCAB - 1]
    head: Any = smaller_model(draft, None, FEW).get_output_embeddings()
    assert isinstance(head, FewTokensHead)
    assert head.vocabulary is not None
    assert head.vocabulary.tolist() == [*range(FEW), VOCAB - 1]
    assert not isinstance(draft.get_output_embeddings(), FewTokensHead)
    whole = smaller_model(draft, None, VOCAB).get_output_embeddings()
    assert whole.weight is draft.get_output_embeddings().weight


def test_a_copy_is_made_once(draft: PreTrainedModel) -> None:
    assert smaller_model(draft, None, None) is draft
    smaller = smaller_model(draft, 4, FEW)
    assert smaller_model(draft, 4, FEW) is smaller
    assert smaller_model(draft, 4, None) is not smaller


@pytest.mark.by_default(strategy=("draft", "auto"))
@pytest.mark.parametrize("strategy", ["draft", "tree", "gsd", "auto"])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_output_is_that_of_plain_generate(
    draft: PreTrainedModel, strategy: str, rows: int
) -> None:
    model = target()
    ids = torch.randint(3, VOCAB, (rows, 7), generator=torch.Generator().manual_seed(rows))
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    kinds = {
        "draft": hf_spec.DraftConfig,
        "tree": hf_spec.TreeConfig,
        "gsd": hf_spec.GsdConfig,
        "auto": hf_spec.AutoConfig,
    }
    sizes: dict[str, Any] = {} if strategy == "auto" else {"max_draft_tokens": 4}
    found = model.generate(
        ids,
        max_new_tokens=24,
        do_sample=False,
        return_dict_in_generate=True,
        spec_strategy=kinds[strategy](**sizes, **SMALLER),
        assistant=draft,
    )
    assert torch.equal(found.sequences, plain)
    if strategy != "auto":
        # The draft model is the quantized target.
        assert found.spec_stats.tau > 0.2


def test_sampled_chains_with_few_tokens(draft: PreTrainedModel) -> None:
    """Tokens that cannot be drafted are still sampled."""
    model = target()
    torch.manual_seed(0)
    found = model.generate(
        torch.arange(3, 9)[None],
        max_new_tokens=200,
        do_sample=True,
        temperature=3.0,
        spec_strategy=hf_spec.DraftConfig(max_draft_tokens=3, **SMALLER),
        assistant=draft,
    )
    assert found[0, 6:].max() > FEW


def test_trained_draft_models_have_few_tokens_already(draft: PreTrainedModel) -> None:
    draft.set_output_embeddings(FewTokensHead(draft.get_output_embeddings(), torch.arange(9)))
    with pytest.raises(OptionError, match=f"the assistant drafts 9 of {VOCAB} tokens already"):
        smaller_model(draft, None, FEW)


def test_nothing_to_quantize(draft: PreTrainedModel) -> None:
    narrow = build("llama")
    for model in (smaller_model(draft, 4, None), narrow):
        with pytest.raises(AssistantError, match="has no linear layers in full precision whose"):
            smaller_model(model, 4, None)


def test_without_bitsandbytes(draft: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OptionError, match="assistant_bits=4 needs the package bitsandbytes: run"):
        smaller_model(draft, 4, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"assistant_bits": 8}, "assistant_bits=8 must be 4 or None"),
        ({"draft_vocab_size": 0}, "draft_vocab_size must be a whole number of at least 1"),
    ],
)
@pytest.mark.parametrize("config", [hf_spec.DraftConfig, hf_spec.AutoConfig])
def test_values(config: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        config(**options)
