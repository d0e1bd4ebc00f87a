"""SmolLM2-135M-Instruct: every strategy gives the same tokens as plain `generate()`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_spec
from hf_spec import FalconConfig
from hf_spec.common.prompts import Prompt, load_prompts
from hf_spec.engine.forward.vocabulary import num_embeddings
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.sdsat.adaptive_tokens import adaptive_tokens
from tests.identity import assert_identical
from tests.tiny_models import left_padded, padded

pytestmark = pytest.mark.real

NEW_TOKENS = 24
BATCH_NEW_TOKENS = 24
UNTRAINED_NEW_TOKENS = 16
PROMPTS = load_prompts(per_task=1)
SHORTEST = min(PROMPTS, key=lambda prompt: len(prompt.turns[0]))
# Prompts of four tasks, with four different lengths.
BATCH = load_prompts(per_task=2)[::3]
ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
# Keys are strategies, some with a suffix that identifies the assistant.
ASSISTANTS = {
    "lookup": None,
    "draft": ADAPTERS / "smollm2-135m-draft",
    "tree": ADAPTERS / "smollm2-135m-draft",
    "gsd": ADAPTERS / "smollm2-135m-draft",
    "disco": ADAPTERS / "smollm2-135m-disco",
    "falcon": ADAPTERS / "smollm2-135m-falcon",
    "falcon-k2": ADAPTERS / "smollm2-135m-falcon-k2",
    "sdsat": ADAPTERS / "smollm2-135m-sdsat",
}


@pytest.fixture(scope="module")
def expected(smollm2: Any) -> dict[str, Tensor]:
    """Return plain `generate()`'s output by prompt id."""
    model, tokenizer = smollm2
    return {
        prompt.id: model.generate(
            prompt.encode(tokenizer), max_new_tokens=NEW_TOKENS, do_sample=False
        )
        for prompt in PROMPTS
    }


@pytest.fixture(scope="module")
def batch(smollm2: Any) -> tuple[dict[str, Tensor], Tensor]:
    """Return four left-padded prompts, and plain `generate()`'s output for the batch."""
    model, tokenizer = smollm2
    inputs = left_padded([prompt.encode(tokenizer)[0] for prompt in BATCH])
    plain = model.generate(**inputs, max_new_tokens=BATCH_NEW_TOKENS, do_sample=False)
    return inputs, plain


def call_of(strategy: str, **options: Any) -> dict[str, Any]:
    return {
        **options,
        "do_sample": False,
        "spec_strategy": strategy.partition("-")[0],
        "assistant": ASSISTANTS[strategy],
        "return_dict_in_generate": True,
    }


@pytest.fixture(scope="module")
def answer(smollm2: Any) -> Callable[[str, Prompt], Any]:
    """Return a function for a strategy's output on a prompt; outputs are cached."""
    model, tokenizer = smollm2

    @cache
    def ask(strategy: str, index: int) -> Any:
        ids = PROMPTS[index].encode(tokenizer)
        return model.generate(**call_of(strategy, input_ids=ids, max_new_tokens=NEW_TOKENS))

    return lambda strategy, prompt: ask(strategy, PROMPTS.index(prompt))


@pytest.mark.by_default(
    prompt=lambda prompt: prompt is SHORTEST,
    strategy=("lookup", "tree", "disco", "falcon", "sdsat"),
)
@pytest.mark.parametrize("prompt", PROMPTS, ids=lambda prompt: prompt.id)
@pytest.mark.parametrize("strategy", ASSISTANTS)
def test_one_prompt(
    strategy: str, prompt: Prompt, answer: Any, smollm2: Any, expected: dict[str, Tensor]
) -> None:
    model, tokenizer = smollm2
    output = answer(strategy, prompt)
    call = call_of(strategy, input_ids=prompt.encode(tokenizer), max_new_tokens=NEW_TOKENS)
    assert_identical(model, call, output, expected[prompt.id], tokenizer=tokenizer)
    assert output.spec_stats.drafted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("prompt", load_prompts(per_task=4), ids=lambda prompt: prompt.id)
def test_one_prompt_more_and_longer(prompt: Prompt, smollm2: Any) -> None:
    model, tokenizer = smollm2
    given = {"input_ids": prompt.encode(tokenizer), "max_new_tokens": 64}
    expected = model.generate(**given, do_sample=False)
    for strategy in ASSISTANTS:
        call = call_of(strategy, **given)
        assert_identical(model, call, model.generate(**call), expected, tokenizer=tokenizer)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ASSISTANTS)
def test_ragged_batch(strategy: str, smollm2: Any, batch: tuple[dict[str, Tensor], Tensor]) -> None:
    inputs, plain = batch
    assert len(set(inputs["attention_mask"].sum(dim=1).tolist())) == len(BATCH) == 4
    model, tokenizer = smollm2
    call = call_of(strategy, **inputs, max_new_tokens=BATCH_NEW_TOKENS)
    assert_identical(model, call, model.generate(**call), plain, tokenizer=tokenizer)


@pytest.mark.full
@pytest.mark.parametrize(
    ("strategy", "tau"),
    [
        ("draft", 0.4),
        ("tree", 0.6),
        ("disco", 0.3),
        ("falcon", 0.6),
        ("falcon-k2", 0.2),
        ("sdsat", 0.25),
    ],
)
def test_the_trained_adapters_are_accepted(strategy: str, tau: float, answer: Any) -> None:
    """The limits are half of the measured values; an untrained draft of these layers has 0.05."""
    stats = [answer(strategy, prompt).spec_stats for prompt in PROMPTS]
    accepted = sum(one.accepted_tokens for one in stats)
    assert accepted / sum(one.target_forwards for one in stats) > tau


@pytest.fixture(scope="module")
def padded_drafts(smollm2: Any) -> list[Any]:
    """Return the first two layers with as many embedding rows as the target, more, and fewer."""
    draft = hf_spec.truncated_draft(smollm2[0], 2)
    return [padded(draft, num_embeddings(smollm2[0]) + rows) for rows in (0, 128, -128)]


@pytest.mark.full
@torch.no_grad()
@pytest.mark.parametrize("strategy", ["draft", "tree"])
def test_drafts_padded_to_another_size(
    strategy: str, smollm2: Any, expected: dict[str, Tensor], padded_drafts: list[Any]
) -> None:
    """Padding rows of the embedding, as in Qwen2.5, change neither tokens nor acceptance."""
    model, tokenizer = smollm2
    ids = SHORTEST.encode(tokenizer)
    plain = expected[SHORTEST.id][:, : ids.shape[1] + UNTRAINED_NEW_TOKENS]
    accepted = []
    for assistant in padded_drafts:
        call = {
            "input_ids": ids,
            "max_new_tokens": UNTRAINED_NEW_TOKENS,
            "do_sample": False,
            "spec_strategy": strategy,
            "assistant": assistant,
            "return_dict_in_generate": True,
        }
        output = model.generate(**call)
        assert_identical(model, call, output, plain, tokenizer=tokenizer)
        accepted.append(output.spec_stats.accepted_tokens)
    assert accepted[1] == accepted[0]


@pytest.mark.full
def test_adaptive_tokens_leave_the_logits_alone(smollm2: Any) -> None:
    """The logits are bit-identical while the adapter is active on the model."""
    model, tokenizer = smollm2
    tokens, _ = adaptive_tokens(model, str(ASSISTANTS["sdsat"]))
    for prompt in PROMPTS[::2]:
        ids = prompt.encode(tokenizer)
        untouched = model(ids).logits
        with tokens.active(model):
            assert torch.equal(model(ids).logits, untouched)


@pytest.mark.full
@pytest.mark.parametrize(
    ("block_size", "tree"),
    [
        (1, "chain"),
        (2, "auto"),
        (2, "falcon-vicuna"),
        (2, "falcon-llama"),
        (3, "auto"),
        (4, [[0], [1], [1, 0], [1, 0, 2], [1, 0, 2, 0], [1, 0, 2, 0, 1]]),
    ],
)
def test_untrained_falcon_heads(
    block_size: int, tree: Any, smollm2: Any, expected: dict[str, Tensor]
) -> None:
    """Wrong drafts never change the tokens."""
    model, tokenizer = smollm2
    ids = SHORTEST.encode(tokenizer)
    head = FalconHead(model, FalconShape(block_size), None).eval()
    call = {
        "input_ids": ids,
        "max_new_tokens": UNTRAINED_NEW_TOKENS,
        "do_sample": False,
        "spec_strategy": FalconConfig(tree=tree),
        "assistant": head,
    }
    plain = expected[SHORTEST.id][:, : ids.shape[1] + UNTRAINED_NEW_TOKENS]
    assert_identical(model, call, model.generate(**call), plain, tokenizer=tokenizer)
