"""SmolLM2-135M with Gemma-3-270M as draft model, and vice versa: two real tokenizers."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import DraftConfig, TreeConfig
from hf_spec.common.prompts import load_prompts
from tests.identity import assert_identical

pytestmark = [pytest.mark.real, pytest.mark.full]

# Target, config, prompt indices, new tokens, and minimum tau (accepted tokens per target forward
# pass). Measured with 24 new tokens: 2.43 and 1.67 for the chain, 3.00 for the tree; 0.85 with
# Gemma-3 as the target.
CASES: list[tuple[str, Any, tuple[int, ...], int, float]] = [
    ("smollm2", DraftConfig(max_draft_tokens=4), (1, 3), 24, 1.2),
    ("smollm2", TreeConfig(max_draft_tokens=4, max_nodes=12, translation="text"), (1,), 24, 1.5),
    ("gemma3", TreeConfig(max_draft_tokens=4, max_nodes=12), (0,), 12, 0.2),
]


@pytest.mark.parametrize(("target", "config", "indices", "new_tokens", "least"), CASES)
def test_identical_with_accepted_drafts(
    target: str,
    config: Any,
    indices: tuple[int, ...],
    new_tokens: int,
    least: float,
    smollm2: Any,
    gemma3: Any,
) -> None:
    pair = (smollm2, gemma3) if target == "smollm2" else (gemma3, smollm2)
    (model, tokenizer), (draft, draft_tokenizer) = pair
    for index in indices:
        ids = load_prompts(per_task=1)[index].encode(tokenizer)
        if target == "gemma3":
            ids = ids[:, :200]
        options = {"max_new_tokens": new_tokens, "do_sample": False}
        call = {
            "input_ids": ids,
            **options,
            "spec_strategy": config,
            "assistant": draft,
            "tokenizer": tokenizer,
            "assistant_tokenizer": draft_tokenizer,
            "return_dict_in_generate": True,
        }
        output = model.generate(**call)
        assert_identical(model, call, output, model.generate(ids, **options))
        assert output.spec_stats.tau > least
