"""Gemma-3-270M: identical output on real prompts, at least half beyond its 512-token window.

Covers the shipped adapters, and untrained draft models and heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_spec
from hf_spec import FalconConfig
from hf_spec.common.prompts import load_prompts
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from tests.identity import assert_identical

pytestmark = pytest.mark.real

NEW_TOKENS = 32
QUICK_NEW_TOKENS = 16
STRATEGIES = ("lookup", "draft", "tree")
FALCON_TREES: list[tuple[int, Any]] = [
    (1, "chain"),
    (2, "falcon-llama"),
    (2, "falcon-vicuna"),
    (3, "auto"),
    (4, [[0], [1], [1, 0], [1, 0, 2], [2]]),
]
ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
SHIPPED = {
    "draft": "gemma-3-270m-draft",
    "tree": "gemma-3-270m-draft",
    "gsd": "gemma-3-270m-draft",
    "disco": "gemma-3-270m-disco",
    "falcon": "gemma-3-270m-falcon",
    "sdsat": "gemma-3-270m-sdsat",
    "auto": "gemma-3-270m-draft",
}


def texts() -> list[str]:
    """Return 12 texts: six single prompts and six that join several prompts."""
    turns = [prompt.turns[0] for prompt in load_prompts(per_task=10)]
    short = turns[::10]
    long = ["\n\n".join(turns[start : start + 60 : 4]) for start in range(6)]
    return [*short, *long]


@pytest.fixture(scope="module")
def prompts(gemma3: Any) -> list[Tensor]:
    # 1,200 tokens are more than twice the window, and span two attention blocks of the prefill.
    return [torch.tensor([gemma3[1](text)["input_ids"][:1200]]) for text in texts()]


@pytest.fixture(scope="module")
def expected(gemma3: Any, prompts: list[Tensor]) -> list[Tensor]:
    """Return plain `generate()`'s output for every prompt."""
    model = gemma3[0]
    return [model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False) for ids in prompts]


def generate(gemma3: Any, ids: Tensor, expected: Tensor, strategy: Any, assistant: Any) -> Any:
    """Return a strategy's output and check that it equals the expected one."""
    model, tokenizer = gemma3
    call = {
        "input_ids": ids,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "spec_strategy": strategy,
        "assistant": assistant,
        "return_dict_in_generate": True,
    }
    output = model.generate(**call)
    assert_identical(model, call, output, expected, tokenizer=tokenizer)
    return output


@pytest.mark.slow
def test_prompts_reach_beyond_the_window(gemma3: Any, prompts: list[Tensor]) -> None:
    window = gemma3[0].config.get_text_config().sliding_window
    lengths = [ids.shape[1] for ids in prompts]
    assert len(lengths) == 12
    assert sum(length > window for length in lengths) >= 6
    assert min(lengths) < window


@pytest.mark.full
@pytest.mark.parametrize("strategy", SHIPPED)
def test_the_shipped_adapters(strategy: str, gemma3: Any) -> None:
    model, tokenizer = gemma3
    inputs = tokenizer("def add(a, b):\n    return a + b\n\ndef subtract(", return_tensors="pt")
    greedy: Any = {"max_new_tokens": QUICK_NEW_TOKENS, "do_sample": False}
    call = {
        **inputs,
        **greedy,
        "spec_strategy": strategy,
        "assistant": ADAPTERS / SHIPPED[strategy],
        "return_dict_in_generate": True,
    }
    output = model.generate(**call)
    expected = model.generate(**inputs, **greedy)
    assert_identical(model, call, output, expected, tokenizer=tokenizer)
    # `auto` decides by measured times and may not draft at all.
    assert strategy == "auto" or output.spec_stats.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize("strategy", SHIPPED)
def test_the_shipped_adapters_beyond_the_window(
    strategy: str, index: int, gemma3: Any, prompts: list[Tensor], expected: list[Tensor]
) -> None:
    generate(gemma3, prompts[index], expected[index], strategy, ADAPTERS / SHIPPED[strategy])


@pytest.mark.slow
@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_identical(
    strategy: str, index: int, gemma3: Any, prompts: list[Tensor], expected: list[Tensor]
) -> None:
    draft = None if strategy == "lookup" else hf_spec.truncated_draft(gemma3[0], 2)
    generate(gemma3, prompts[index], expected[index], strategy, draft)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(12))
@pytest.mark.parametrize(("block_size", "tree"), FALCON_TREES)
def test_untrained_falcon_heads(
    block_size: int,
    tree: Any,
    index: int,
    gemma3: Any,
    prompts: list[Tensor],
    expected: list[Tensor],
) -> None:
    """Wrong drafts never change the tokens. The head's layers have the target's window."""
    torch.manual_seed(block_size)
    head = FalconHead(gemma3[0], FalconShape(block_size, 2), torch.arange(4096)).eval()
    output = generate(gemma3, prompts[index], expected[index], FalconConfig(tree=tree), head)
    assert output.spec_stats.draft_forwards > 0
