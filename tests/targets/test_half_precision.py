"""bfloat16 and float16 on the CPU: tokens differ from plain `generate()` only at ties."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tests.targets.cases import NEW_TOKENS, assert_same_up_to_ties, assistant_of
from tests.tiny_models import build, sdsat_adapter, settled_prompt

STRATEGIES = ("lookup", "draft", "tree", "gsd", "disco", "auto")
# The packed path, sliding windows, and the rectangular path.
CASES = [
    *((name, torch.bfloat16, strategy) for name in ("llama", "gemma3") for strategy in STRATEGIES),
    *(("bloom", torch.bfloat16, strategy) for strategy in ("lookup", "tree")),
    *(("llama", torch.float16, strategy) for strategy in ("lookup", "tree", "gsd")),
]
CALL: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "do_sample": False}


@cache
def half(name: str, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = copy.deepcopy(build(name))
    return model.to(dtype)


def rows(name: str) -> list[torch.Tensor]:
    """Return a prompt with a high acceptance rate and one with a lower rate."""
    settled = settled_prompt(name)
    return [settled, settled[:, :21]]


@pytest.mark.by_default(strategy=("lookup", "tree", "gsd"))
@pytest.mark.parametrize(("name", "dtype", "strategy"), CASES)
def test_every_difference_is_a_tie(name: str, dtype: torch.dtype, strategy: str) -> None:
    model = half(name, dtype)
    accepted = 0
    for prompt in rows(name):
        output = model.generate(
            prompt, **CALL, **assistant_of(model, name, strategy), return_dict_in_generate=True
        )
        plain = model.generate(prompt, **CALL)
        assert_same_up_to_ties(model, prompt, plain[0].tolist(), output.sequences[0].tolist())
        accepted += output.spec_stats.accepted_tokens
    assert accepted > 0 or strategy in {"lookup", "auto"}


@pytest.mark.parametrize("strategy", ["falcon", "sdsat"])
def test_adapters(strategy: str) -> None:
    model = half("llama", torch.bfloat16)
    arguments = assistant_of(model, "llama", strategy)
    if strategy == "sdsat":
        arguments["assistant"] = sdsat_adapter("llama")
    accepted = 0
    for prompt in rows("llama"):
        output = model.generate(prompt, **CALL, **arguments, return_dict_in_generate=True)
        plain = model.generate(prompt, **CALL)
        assert_same_up_to_ties(model, prompt, plain[0].tolist(), output.sequences[0].tolist())
        accepted += output.spec_stats.accepted_tokens
    assert accepted > 0
