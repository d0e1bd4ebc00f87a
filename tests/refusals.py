"""Check for calls that must raise an error, and unsupported models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T

from hf_spec import SpecError, UnsupportedError
from tests.model_watch import count_forwards, snapshot
from tests.tiny_models import VOCAB, build, repetitive_prompt

PROMPT = repetitive_prompt()
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def small_llama(**changes: Any) -> T.LlamaForCausalLM:
    torch.manual_seed(0)
    return T.LlamaForCausalLM(T.LlamaConfig(**{**SMALL, **changes})).eval()


def t5() -> T.PreTrainedModel:
    config = T.T5Config(vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    return T.T5ForConditionalGeneration(config).eval()


def rwkv() -> T.PreTrainedModel:
    config = T.RwkvConfig(
        vocab_size=VOCAB, hidden_size=8, attention_hidden_size=8, num_hidden_layers=2
    )
    return T.RwkvForCausalLM(config).eval()


def minimax() -> T.PreTrainedModel:
    kinds = ["linear_attention", "full_attention"]
    config = T.MiniMaxConfig(**SMALL, head_dim=8, num_local_experts=2, layer_types=kinds)
    return T.MiniMaxForCausalLM(config).eval()


def model_without_head() -> T.PreTrainedModel:
    return T.LlamaModel(T.LlamaConfig(**SMALL)).eval()


def refuse(
    match: str,
    *,
    error: type[SpecError] = UnsupportedError,
    model: T.PreTrainedModel | None = None,
    **call: Any,
) -> None:
    """Check that a call raises before any forward pass and leaves the models unchanged."""
    model = model or build("llama")
    call = {"max_new_tokens": 4, "spec_strategy": "lookup", **call}
    if not {"input_ids", "inputs", "inputs_embeds", "input_features"} & set(call):
        call["input_ids"] = PROMPT
    watched = [m for m in (model, call.get("assistant")) if isinstance(m, T.PreTrainedModel)]
    before = [snapshot(m) for m in watched]
    with count_forwards(*watched) as forwards, pytest.raises(error, match=match):
        model.generate(**call)
    assert forwards == []
    assert [snapshot(m) for m in watched] == before
