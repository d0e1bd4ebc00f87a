"""Reports of failed identity tests; see `identity`."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import LookupConfig
from tests import tiny_models
from tests.identity import assert_identical, difference
from tests.model_watch import count_forwards
from tests.tiny_models import VOCAB

NEW_TOKENS = 8
CONFIG = LookupConfig(match_length=4)


def call_of(name: str, kind: str) -> dict[str, Any]:
    prompts = tiny_models.prompts(name, kind)
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "repetition_penalty": 1.0}
    return {**prompts, **options, "spec_strategy": CONFIG}


def plain(model: Any, call: dict[str, Any]) -> Any:
    call = {**call, "spec_strategy": None, "return_dict_in_generate": True, "output_logits": True}
    return model.generate(**call)


def changed(sequences: Tensor, row: int, new_token: int, token: int | None = None) -> Tensor:
    """Return a copy with another token at one position, and wrong tokens after it."""
    wrong = sequences.clone()
    position = sequences.shape[1] - NEW_TOKENS + new_token
    wrong[row, position:] = (wrong[row, position:] + 1) % VOCAB
    if token is not None:
        wrong[row, position] = token
    return wrong


def report(model: Any, call: dict[str, Any], output: Any, expected: Any, **more: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_identical(model, call, output, expected, **more)
    return str(caught.value)


def test_equal_tokens_need_no_forward_pass() -> None:
    model = tiny_models.build("llama")
    call = call_of("llama", "ragged")
    expected = plain(model, call)
    output = model.generate(**call)
    with count_forwards(model) as forwards:
        assert_identical(model, call, output, expected)
        assert_identical(model, call, output.tolist(), expected.sequences)
    assert len(forwards) == 0


def test_a_wrong_token_is_reported_with_all_that_reproduces_it() -> None:
    model = tiny_models.build("llama")
    call = call_of("llama", "one")
    expected = plain(model, call)
    wrong = changed(expected.sequences, row=0, new_token=3)
    tokenizer = tiny_models.tokenizer()
    text = report(model, call, wrong, expected, tokenizer=tokenizer)
    prompt = call["input_ids"][0].tolist()
    right = int(expected.sequences[0, len(prompt) + 3])
    best = expected.logits[3][0].topk(2)
    assert best.indices[0] == right
    second = int(best.indices[1])
    for part in (
        "differs from plain generate() in 1 of 1 rows",
        "LlamaForCausalLM",
        "torch.float32",
        "strategy: LookupConfig(",
        "match_length=4",
        "'max_new_tokens': 8",
        "'repetition_penalty': 1.0",
        f"row 0, prompt of {len(prompt)} tokens: {prompt} {tokenizer.decode(prompt)!r}",
        f"first difference at new token 3 (position {len(prompt) + 3})",
        f"{(right + 1) % VOCAB} {tokenizer.decode([(right + 1) % VOCAB])!r}, plain generate() has "
        f"{right} {tokenizer.decode([right])!r}",
        "not a tie in torch.float32",
    ):
        assert part in text, text
    assert logits_in(text) == {
        right: pytest.approx(float(best.values[0]), rel=1e-4),
        second: pytest.approx(float(best.values[1]), rel=1e-4),
    }


def logits_in(text: str) -> dict[int, float]:
    """Return the two tokens of a report with their logits."""
    [line] = [line for line in text.splitlines() if line.startswith("two largest logits")]
    pairs = re.findall(r"(\d+)(?: '\w+')?: (-?[\d.e-]+)", line)
    assert len(pairs) == 2
    return {int(token): float(logit) for token, logit in pairs}


@pytest.mark.parametrize("name", ["llama", "gpt2", "falcon_alibi"])
def test_the_second_row_of_a_padded_batch_is_named(name: str) -> None:
    """Padding is neither shown nor passed to the target, for any kind of positions."""
    model = tiny_models.build(name)
    call = call_of(name, "ragged")
    expected = plain(model, call)
    wrong = changed(expected.sequences, row=1, new_token=5)
    text = report(model, call, changed(wrong, row=4, new_token=2), expected)
    prompt = call["input_ids"][1][call["attention_mask"][1].bool()].tolist()
    assert 0 < len(prompt) < call["input_ids"].shape[1]
    assert "in 2 of 5 rows" in text
    assert f"row 1, prompt of {len(prompt)} tokens: {prompt}\n" in text
    assert f"new token 5 (position {call['input_ids'].shape[1] + 5})" in text
    best = expected.logits[5][1].topk(2)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    assert logits_in(text) == {token: pytest.approx(logit, rel=1e-4) for token, logit in pairs}


@pytest.fixture(scope="module")
def twins() -> PreTrainedModel:
    """Return a bfloat16 model in which every token below 48 has a twin with the same logit."""
    model = copy.deepcopy(tiny_models.build("llama")).to(torch.bfloat16)
    head: Any = model.get_output_embeddings()
    weight = head.weight.detach().clone()
    weight[VOCAB // 2 : 2 * (VOCAB // 2)] = weight[: VOCAB // 2]
    head.weight = torch.nn.Parameter(weight)
    return model


@pytest.mark.parametrize(("shift", "verdict"), [(VOCAB // 2, "a tie"), (1, "not a tie")])
def test_ties_are_told_from_mistakes(twins: PreTrainedModel, shift: int, verdict: str) -> None:
    call = call_of("llama", "one")
    expected = plain(twins, call).sequences
    token = int(expected[0, -NEW_TOKENS]) % (VOCAB // 2)
    expected[0, -NEW_TOKENS] = token
    text = report(twins, call, changed(expected, 0, 0, token + shift), expected, baseline="none")
    assert f"\n{verdict} in torch.bfloat16: margin" in text
    assert "none has" in text


def test_an_output_that_ends_early() -> None:
    model = tiny_models.build("llama")
    call = call_of("llama", "one")
    expected = plain(model, call).sequences.tolist()
    text = report(model, call, [expected[0][:-2]], expected)
    assert f"new token {NEW_TOKENS - 2}" in text
    assert ": the end, plain generate() has" in text
    assert "not a tie: one of the outputs ends" in text


def test_several_outputs_of_a_prompt() -> None:
    model = tiny_models.build("llama")
    call = call_of("llama", "ragged")
    rows = plain(model, call).sequences.repeat_interleave(2, dim=0)
    text = report(model, call, changed(rows, row=3, new_token=1), rows)
    prompt = call["input_ids"][1][call["attention_mask"][1].bool()].tolist()
    assert f"row 3, prompt of {len(prompt)} tokens: {prompt}\n" in text
    assert "5 rows, plain generate() has 10" in difference(model, call, rows[:5], rows)
