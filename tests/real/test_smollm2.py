"""SmolLM2-135M-Instruct: every strategy gives plain `generate()`'s tokens on real prompts."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import hf_spec
from hf_spec.bench.prompts import Prompt, load_prompts
from tests.tiny_models import left_padded

pytestmark = pytest.mark.real

NEW_TOKENS = 64
BATCH_NEW_TOKENS = 32
PROMPTS = load_prompts(per_task=2)
# Four tasks, and so four lengths.
BATCH = PROMPTS[::3]
STRATEGIES = ("lookup", "draft", "tree")


@pytest.fixture(scope="module")
def draft(smollm2: Any) -> Any:
    return hf_spec.truncated_draft(smollm2[0], 2)


@pytest.fixture(scope="module")
def expected(smollm2: Any) -> dict[str, Tensor]:
    """What plain `generate()` answers, by prompt."""
    model, tokenizer = smollm2
    return {
        prompt.id: model.generate(
            prompt.encode(tokenizer), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        for prompt in PROMPTS
    }


@pytest.fixture(scope="module")
def batch(smollm2: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Four prompts padded on the left, and plain `generate()`'s answer to the batch."""
    model, tokenizer = smollm2
    inputs = left_padded([prompt.encode(tokenizer)[0] for prompt in BATCH])
    plain = model.generate(**inputs, max_new_tokens=BATCH_NEW_TOKENS, do_sample=False)
    return inputs, plain


def speculate(model: Any, strategy: str, draft: Any, **options: Any) -> Any:
    return model.generate(
        **options,
        do_sample=False,
        spec_strategy=strategy,
        assistant=None if strategy == "lookup" else draft,
        return_dict_in_generate=True,
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_prompt(
    strategy: str, prompt: Prompt, smollm2: Any, draft: Any, expected: dict[str, Tensor]
) -> None:
    model, tokenizer = smollm2
    ids = prompt.encode(tokenizer)
    output = speculate(model, strategy, draft, input_ids=ids, max_new_tokens=NEW_TOKENS)
    assert output.sequences.tolist() == expected[prompt.id].tolist()
    assert output.spec_stats.drafted_tokens > 0


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ragged_batch(
    strategy: str, smollm2: Any, draft: Any, batch: tuple[dict[str, Tensor], Tensor]
) -> None:
    inputs, plain = batch
    assert len(set(inputs["attention_mask"].sum(dim=1).tolist())) == len(BATCH) == 4
    output = speculate(smollm2[0], strategy, draft, **inputs, max_new_tokens=BATCH_NEW_TOKENS)
    for row, (got, wanted) in enumerate(zip(output.sequences, plain, strict=True)):
        assert got.tolist() == wanted.tolist(), f"row {row}"
