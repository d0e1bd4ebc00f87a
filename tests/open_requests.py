"""Requests that join and leave a batch, and their responses by plain `generate()`."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GenerationConfig

from hf_spec.generation.open_generation import OpenGeneration
from tests import tiny_models

NEW_TOKENS = 14
PROMPTS = [
    tiny_models.repetitive_prompt(length, seed=length)[0].tolist() for length in (21, 3, 14, 1, 9)
]


def generation(name: str = "llama", strategy: str = "lookup") -> OpenGeneration:
    given = tiny_models.speculation(name, strategy)
    model = tiny_models.build(name)
    return OpenGeneration(model, given["spec_strategy"], given.get("assistant"), None)


def greedy(new_tokens: int = NEW_TOKENS, **settings: Any) -> GenerationConfig:
    return GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0, **settings)


def drawn(**settings: Any) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=NEW_TOKENS, do_sample=True, top_k=0, pad_token_id=0, **settings
    )


def alone(prompt: list[int], config: GenerationConfig, name: str = "llama") -> list[int]:
    ids = torch.tensor([prompt])
    output = tiny_models.build(name).generate(
        ids, attention_mask=torch.ones_like(ids), generation_config=config
    )
    return output[0, len(prompt) :].tolist()
