"""One adapter of each method for a tiny model, with nontrivial weights."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_spec.adapters.adapter import BaseModel, known_methods, save_adapter
from hf_spec.adapters.folder import SpecAdapter
from hf_spec.methods.disco.classifier import DiscoClassifier
from hf_spec.methods.draft_model.trained import TrainableDraft
from tests.falcon_reference import random_head
from tests.tiny_models import VOCAB, build, repetitive_prompt, sdsat_adapter

METHODS = known_methods()
PROMPT = repetitive_prompt()
GREEDY: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


@cache
def sample(method: str) -> SpecAdapter:
    """Return an adapter for the tiny Llama, cached per session; do not modify it."""
    model = fresh_model()
    if method == "falcon":
        return random_head("llama").to_adapter({"tree": [[0], [1], [0, 0]], "max_depth": 4})
    if method == "sdsat":
        return sdsat_adapter("llama")
    torch.manual_seed(11)
    if method == "disco":
        options: Any = {"threshold": 0.4, "max_draft_tokens": 3, "draft": {"truncated": 2}}
        return DiscoClassifier().to_adapter(BaseModel.of(model), **options)
    return TrainableDraft(model, 2, 4, torch.arange(0, VOCAB, 2)).to_adapter({})


def save_sample(folder: Path, method: str) -> Path:
    """Save the adapter of a method and return the folder."""
    save_adapter(folder, sample(method))
    return folder


def fresh_model(name: str = "llama", seed: int = 0) -> PreTrainedModel:
    """Return a tiny model that the caller may modify."""
    return copy.deepcopy(build(name, seed))


def plain(model: Any) -> torch.Tensor:
    """Return the output of plain `generate()` for the prompt."""
    return model.generate(input_ids=PROMPT, **GREEDY)


def drafted(model: Any, method: str, **arguments: Any) -> torch.Tensor:
    """Return the output with the strategy of a method, and check that it drafted."""
    output = model.generate(
        input_ids=PROMPT,
        **GREEDY,
        spec_strategy=sample(method).strategy,
        return_dict_in_generate=True,
        **arguments,
    )
    assert output.spec_stats.drafted_tokens > 0
    return output.sequences
