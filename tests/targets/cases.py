"""Calls that are made of an ordinary model and of the same model kept in another way."""

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
    """Arguments that choose a strategy, with an assistant made of `model`, which is `name`."""
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
    """Greedy tokens with a strategy and without, and how many drafts were accepted."""
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
    """Sampled tokens with drafts that are sampled too, and how many were accepted."""
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
    """Every difference is one of the two largest logits within the rounding of the dtype."""
    for difference in differences(model, prompt, plain, got, NEW_TOKENS):
        assert difference.kind == TIE, difference
