"""In bfloat16 the bits of a token's hidden states depend only on its prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as T

import hf_spec
from examples.studies.bfloat16_invariance.splits import (
    compare_splits,
    first_difference,
    num_threads,
    run_chunks,
)
from tests.compiler import needs_compiler
from tests.identity import assert_identical
from tests.tiny_models import LLAMA_LIKE, VOCAB, left_padded

pytestmark = needs_compiler

SIZES = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2}
MODELS = {
    "llama": T.LlamaConfig(**LLAMA_LIKE | SIZES | {"num_attention_heads": 8}),
    "qwen2": T.Qwen2Config(**LLAMA_LIKE | SIZES | {"num_key_value_heads": 4}),
    "gemma3": T.Gemma3TextConfig(
        **LLAMA_LIKE | SIZES, head_dim=16, sliding_window=24, query_pre_attn_scalar=16
    ),
}


@pytest.fixture(params=MODELS)
def target(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return T.AutoModelForCausalLM.from_config(MODELS[request.param], dtype=torch.bfloat16).eval()


def texts_of(length: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(3, VOCAB, (2, length), generator=generator).tolist()


@pytest.mark.by_default(mode=("on",))
@pytest.mark.parametrize("mode", ["off", "on"])
def test_no_split_of_a_text_changes_a_bit(target: Any, mode: str) -> None:
    hf_spec.compile(target, mode)
    rows = compare_splits(target, texts_of(70), chunks=(5, 16, 33), trees=((4, 1), (8, 3)))
    assert len(rows) == 9
    assert [row for row in rows if row["differs"]] == []


def test_two_threads_compute_the_same_bits(target: Any) -> None:
    [text], sizes = texts_of(40)[:1], (1, 16)
    alone = [run_chunks(target, [text], size)[0] for size in sizes]
    with num_threads(2):
        shared = [run_chunks(target, [text], size)[0] for size in sizes]
    assert [first_difference(found, alone[0]) for found in (*alone, *shared)] == [None] * 4


@pytest.mark.by_default(strategy=("tree",))
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
def test_greedy_output_is_that_of_none(target: Any, strategy: str) -> None:
    generator = torch.Generator().manual_seed(2)
    given: dict[str, Any] = {"max_new_tokens": 48, "do_sample": False}
    if strategy == "tree":
        options = {"spec_strategy": strategy, "assistant": target}
    else:
        options = {"spec_strategy": strategy}
    for _ in range(4):
        ids = torch.randint(3, VOCAB, (1, 40), generator=generator).repeat(1, 2)
        none = target.generate(ids, **given, spec_strategy="none")
        call = {"input_ids": ids, **given, **options}
        assert_identical(target, call, target.generate(**call), none, baseline="none")


def test_a_row_of_a_batch_gets_what_it_gets_alone(target: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    given: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
    rows = [torch.randint(3, VOCAB, (length,), generator=generator) for length in (30, 9, 21)]
    alone = [target.generate(row[None], **given, spec_strategy="none")[0, -24:] for row in rows]
    batch = left_padded(rows)
    call = {**batch, **given, "spec_strategy": "lookup"}
    expected = torch.cat([batch["input_ids"], torch.stack(alone)], dim=1)
    assert_identical(target, call, target.generate(**call), expected, baseline="none")
