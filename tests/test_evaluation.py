"""lm-evaluation-harness on a model with a stored strategy gets the output of plain decoding."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from tokenizers import Regex
from tokenizers.pre_tokenizers import Split
from transformers import PreTrainedModel, StoppingCriteriaList

from tests import tiny_models
from tests.identity import assert_identical

pytest.importorskip("lm_eval", reason="needs the extra 'evaluation'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils_hf import stop_sequences_criteria

pytestmark = pytest.mark.integration

NEW_TOKENS = 24


@pytest.mark.parametrize("strategy", tiny_models.STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "mistral_sliding"])
def test_its_criterion_ends_a_batch_when_every_row_has_said_it(name: str, strategy: str) -> None:
    batch = tiny_models.prompts(name, "ragged")
    tokenizer = tiny_models.tokenizer()
    given = {**batch, "max_new_tokens": NEW_TOKENS, "do_sample": False}
    model = tiny_models.build(name)
    text = model.generate(**given)[:, batch["input_ids"].shape[1] :]
    # Letters that occur in every row, in different words.
    common = sorted(set.intersection(*(set(tokenizer.decode(row)) for row in text)))
    lengths = set()
    for stop in (common[:1], common[1:2], common[2:4]):

        def criteria(stop: list[str] = stop) -> StoppingCriteriaList:
            rows, width = batch["input_ids"].shape
            return stop_sequences_criteria(tokenizer, stop, width, rows)

        expected = model.generate(**given, stopping_criteria=criteria())
        drafted = tiny_models.speculation(name, strategy)
        output = model.generate(**given, **drafted, stopping_criteria=criteria())
        assert_identical(model, {**given, **drafted}, output, expected, tokenizer=tokenizer)
        lengths.add(expected.shape[1])
    assert len(lengths) > 1, "some stop has to cut"


def answers(model: PreTrainedModel, batch_size: int, until: list[str]) -> list[str]:
    tokenizer = copy.deepcopy(tiny_models.tokenizer())
    tokenizer.backend_tokenizer.pre_tokenizer = Split(Regex(".."), "isolated")
    tokenizer.add_special_tokens({"eos_token": "abcdef"})
    judge: Any = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size)
    batch = tiny_models.prompts("llama", "ragged")
    texts = [tokenizer.decode(ids[mask.bool()]) for ids, mask in zip(*batch.values(), strict=True)]
    options = {"until": until, "max_gen_toks": NEW_TOKENS, "do_sample": False}
    requests = [
        Instance("generate_until", {}, arguments=(text, options), idx=index)
        for index, text in enumerate(texts)
    ]
    found: list[str] = judge.generate_until(requests, disable_tqdm=True)
    return found


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("strategy", ["lookup", "none"])
def test_answers_are_those_of_plain_decoding(strategy: str, batch_size: int) -> None:
    plain = tiny_models.build("llama")
    batch = tiny_models.prompts("llama", "ragged")
    text = plain.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
    rows = [tiny_models.tokenizer().decode(row) for row in text[:, batch["input_ids"].shape[1] :]]
    # A letter that occurs early in some rows and late in others: stopping all rows at the first
    # occurrence would cut the others short.
    until = [max(set.intersection(*map(set, rows)), key=lambda c: max(r.index(c) for r in rows))]
    stored = copy.deepcopy(plain)
    stored.generation_config.spec_strategy = strategy
    expected = answers(plain, batch_size, until)
    assert answers(stored, batch_size, until) == expected
    assert len({len(answer) for answer in expected}) > 1
