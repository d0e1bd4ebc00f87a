"""SmolLM2-135M-Instruct: batches give the same answers as single prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import BatchTextStreamer, DraftConfig, LookupConfig
from hf_spec.common.prompts import left_padded, load_prompts
from tests.identity import assert_identical, assert_identical_answers

pytestmark = [pytest.mark.real, pytest.mark.full]

NEW_TOKENS = 12
PROMPTS = load_prompts(per_task=2)
DRAFT = Path(__file__).parents[2] / "examples" / "adapters" / "smollm2-135m-draft"


@pytest.fixture(scope="module")
def expected(smollm2: Any) -> list[list[int]]:
    """Return plain `generate()`'s answer to each prompt alone."""
    model, tokenizer = smollm2
    answers = []
    for prompt in PROMPTS:
        ids = prompt.encode(tokenizer)
        sequence = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0]
        answers.append(sequence[ids.shape[1] :].tolist())
    return answers


@pytest.mark.parametrize("strategy", ["lookup", "draft", "tree"])
def test_twelve_prompts_on_four_slots(
    smollm2: Any, expected: list[list[int]], strategy: str
) -> None:
    model, tokenizer = smollm2
    texts = dict.fromkeys(range(len(PROMPTS)), "")

    def hear(row: int, text: str, ended: bool) -> None:
        texts[row] += text

    prompts = [prompt.encode(tokenizer)[0].tolist() for prompt in PROMPTS]
    call = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "max_batch": 4,
        "spec_strategy": strategy,
        "assistant": None if strategy == "lookup" else DRAFT,
    }
    streamer = BatchTextStreamer(tokenizer, hear)
    outputs = model.generate_batch(prompts, **call, streamer=streamer)
    answers = [output.generated_tokens for output in outputs.values()]
    assert_identical_answers(model, prompts, call, answers, expected, tokenizer=tokenizer)
    assert list(texts.values()) == tokenizer.batch_decode(expected)
    assert outputs.spec_stats.accepted_tokens > 0


@pytest.mark.parametrize("batching", ["unpadded", "unpadded_kv", "unpadded_input", "padded"])
def test_every_way_to_pad(smollm2: Any, expected: list[list[int]], batching: str) -> None:
    model, tokenizer = smollm2
    batch = left_padded([prompt.encode(tokenizer)[0] for prompt in PROMPTS[:6]])
    width = batch["input_ids"].shape[1]
    for config, assistant in (
        (LookupConfig(batching=batching), None),
        (DraftConfig(batching=batching), DRAFT),
    ):
        call = {
            **batch,
            "max_new_tokens": NEW_TOKENS,
            "do_sample": False,
            "spec_strategy": config,
            "assistant": assistant,
        }
        sequences = model.generate(**call).tolist()
        ends = torch.tensor(model.generation_config.eos_token_id)
        # Rows are padded after their end-of-sequence token.
        rows = zip(sequences, expected, strict=False)
        begins = [tokens[: width + len(answer)] for tokens, answer in rows]
        alone = [
            [*prompt, *answer]
            for prompt, answer in zip(batch["input_ids"].tolist(), expected, strict=False)
        ]
        assert_identical(model, call, begins, alone, tokenizer=tokenizer)
        for answer in expected[: len(sequences)]:
            assert len(answer) == NEW_TOKENS or answer[-1] in ends
