"""`generate()` calls for a model and for its sharded, offloaded or quantized versions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

import hf_spec
from hf_spec.evaluation.lossless.mismatch import TIE, differences
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests import tiny_models

NEW_TOKENS = 16
SEED = 7


def assistant_of(model: PreTrainedModel, name: str, strategy: str) -> dict[str, Any]:
    """Return arguments for a strategy, with an assistant built from `model` (tiny model `name`)."""
    if strategy in {"draft", "tree", "gsd"}:
        return {"spec_strategy": strategy, "assistant": hf_spec.truncated_draft(model, 2)}
    if strategy == "sdsat":
        dense = tiny_models.build(name)
        adapter = tiny_models.random_adaptive_tokens(dense, mode="embeddings")
        return {**tiny_models.speculation(name, strategy), "assistant": adapter}
    if strategy == "falcon":
        torch.manual_seed(SEED)
        head = FalconHead(model, FalconShape(), None).requires_grad_(False).eval()
        return {**tiny_models.speculation(name, strategy), "assistant": head}
    if strategy == "auto":
        assistant = hf_spec.truncated_draft(model, 2)
        return {**tiny_models.speculation(name, strategy), "assistant": assistant}
    return tiny_models.speculation(name, strategy)


def speculate(
    model: PreTrainedModel, name: str, strategy: str, kind: str = "one"
) -> dict[str, Any]:
    """Return greedy tokens with and without a strategy, and the number of accepted tokens."""
    call: dict[str, Any] = {
        **tiny_models.prompts(name, kind),
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
    }
    arguments = assistant_of(model, name, strategy)
    output = model.generate(**call, **arguments, return_dict_in_generate=True)
    return {
        "tokens": output.sequences.tolist(),
        "plain": model.generate(**call).tolist(),
        "accepted": output.spec_stats.accepted_tokens,
    }


def sampled(model: PreTrainedModel, strategy: str) -> dict[str, Any]:
    """Return tokens sampled with sampled drafts, and the number of accepted tokens."""
    config = {"draft": hf_spec.DraftConfig, "tree": hf_spec.TreeConfig}[strategy]()
    output = model.generate(
        **tiny_models.prompts("llama", "one"),
        max_new_tokens=NEW_TOKENS,
        do_sample=True,
        temperature=0.7,
        spec_strategy=config,
        assistant=hf_spec.truncated_draft(model, 2),
        return_dict_in_generate=True,
    )
    return {"tokens": output.sequences.tolist(), "accepted": output.spec_stats.accepted_tokens}


def assert_same_up_to_ties(
    model: PreTrainedModel, prompt: Tensor, plain: list[int], got: list[int]
) -> None:
    """Check that tokens differ only where the two largest logits tie within rounding."""
    for difference in differences(model, prompt, plain, got, NEW_TOKENS):
        assert difference.kind == TIE, difference
