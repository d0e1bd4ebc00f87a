"""Architectures that cannot decode draft trees raise an error before the first forward pass.

Each was found by decoding a tiny random model of every causal architecture of transformers 5.23:
without the error its output differs from plain `generate()`.
"""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.models.support_checks import check_model
from tests import tiny_models

SMALL = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
REFUSED = {
    "bert": (SMALL, "BertLMHeadModel .*is_decoder is False"),
    "doge": (SMALL, "DogeForCausalLM .* weighs keys"),
    "gpt_neo": (
        {
            "vocab_size": 97,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "attention_types": [[["global", "local"], 1]],
        },
        "GPTNeoForCausalLM .* local layers",
    ),
    "mpt": ({"vocab_size": 97, "d_model": 32, "n_layers": 2, "n_heads": 4}, "no position_ids"),
    "openai-gpt": (
        {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4},
        "OpenAIGPTLMHeadModel .* caches no keys and values",
    ),
    "roformer": (
        {**SMALL, "is_decoder": True},
        "RoFormerForCausalLM .* share one set of position angles",
    ),
}

TOWER = {"hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
REFUSED_WITH_IMAGES = {
    "kosmos-2.5": (
        {
            "text_config": {
                "vocab_size": 97,
                "embed_dim": 32,
                "layers": 2,
                "ffn_dim": 64,
                "attention_heads": 4,
            },
            "vision_config": {**TOWER, "num_attention_heads": 2},
        },
        "Kosmos2_5.* positions from the padding token on",
    ),
    "mllama": (
        {
            "text_config": {
                **SMALL,
                "num_key_value_heads": 2,
                "cross_attention_layers": [1],
                "pad_token_id": 0,
            },
            "vision_config": {**TOWER, "attention_heads": 2, "num_global_layers": 1},
        },
        "Mllama.* cross-attention layers",
    ),
}


@pytest.mark.parametrize("kind", REFUSED_WITH_IMAGES)
def test_image_text_models_refused_by_name(kind: str) -> None:
    options, message = REFUSED_WITH_IMAGES[kind]
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **options)
        model = AutoModelForImageTextToText.from_config(config)
    with pytest.raises(UnsupportedError, match=message):
        check_model(model)


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_with_the_reason(kind: str) -> None:
    options, message = REFUSED[kind]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options))
    with pytest.raises(UnsupportedError, match=message):
        check_model(model)


@pytest.mark.parametrize("kind", ["bert", "gpt_neo"])
def test_the_same_architecture_is_served_where_it_can_be(kind: str) -> None:
    options = dict(REFUSED[kind][0])
    if kind == "bert":
        options["is_decoder"] = True
    else:
        options["attention_types"] = [[["global"], 2]]
    with torch.device("meta"):
        check_model(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options)))


@pytest.mark.parametrize("name", tiny_models.ARCHITECTURES)
def test_nothing_in_the_matrix_is_refused(name: str) -> None:
    check_model(tiny_models.build(name))
    check_model(tiny_models.draft_model(name))
