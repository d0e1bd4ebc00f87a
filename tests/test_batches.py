"""Rows of a batch decode as they do alone, for any size, order and padding, also continuously."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import pytest
import torch

from hf_spec import (
    LookupConfig,
    OptionError,
    SpecGenerateOutput,
    UnsupportedError,
    known_strategies,
)
from hf_spec.common.compat import CACHE_NAME, output_cache
from hf_spec.engine.forward.padded_batching import BATCHING
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.identity import assert_identical, assert_identical_answers
from tests.tiers import FEW_STRATEGIES

NEW_TOKENS = 16
STRATEGIES = tiny_models.MATRIX
# A sliding window, one packed sequence, learned positions, and rectangular inputs.
MODELS = ("gemma3", "llama", "gpt2", "falcon_alibi")
NUM_PROMPTS = 40
SLOTS = 6


@cache
def prompts(name: str) -> list[list[int]]:
    """Return 40 prompts of 1 to 45 tokens; every fourth has a continuation by the model."""
    generator = torch.Generator().manual_seed(9)
    settled = tiny_models.settled_prompt(name)[0].tolist()
    found = []
    for index in range(NUM_PROMPTS):
        length = int(torch.randint(1, 25, (1,), generator=generator))
        pattern = torch.randint(3, tiny_models.VOCAB, (3,), generator=generator)
        text = pattern.repeat(9)[:length].tolist()
        found.append(settled[: 21 + length] if index % 4 == 0 else text)
    return found


@cache
def alone(name: str, eos: tuple[int, ...] = ()) -> list[list[int]]:
    """Return the response of plain `generate()` to each prompt alone."""
    answers = []
    for prompt in prompts(name):
        ids = torch.tensor([prompt])
        sequence = tiny_models.build(name).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=list(eos) or None,
        )
        answers.append(sequence[0, len(prompt) :].tolist())
    return answers


@cache
def ends(name: str) -> tuple[int, ...]:
    """Return EOS tokens that end about half of the responses, early or late."""
    said = [answer[index] for answer, index in zip(alone(name), (3, 7, 11, 14) * 2, strict=False)]
    return tuple(sorted(set(said)))


def arguments(name: str, strategy: str, batching: str = "unpadded") -> dict[str, Any]:
    given = tiny_models.speculation(name, strategy)
    config = parse_strategy(given["spec_strategy"])
    return {**given, "spec_strategy": dataclasses.replace(config, batching=batching)}


def check_batch(
    name: str, strategy: str, rows: list[int], batching: str = "unpadded"
) -> SpecGenerateOutput:
    eos = ends(name)
    batch = tiny_models.left_padded([torch.tensor(prompts(name)[row]) for row in rows])
    call = {
        **batch,
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": list(eos),
        "pad_token_id": 0,
        "return_dict_in_generate": True,
        **arguments(name, strategy, batching),
    }
    model = tiny_models.build(name)
    output = model.generate(**call)
    answers = [alone(name, eos)[row] for row in rows]
    new_tokens = max(map(len, answers))
    expected = [
        [*prompt, *answer, *[0] * (new_tokens - len(answer))]
        for prompt, answer in zip(batch["input_ids"].tolist(), answers, strict=True)
    ]
    assert_identical(model, call, output, expected)
    return output


def orders(size: int) -> list[list[int]]:
    """Return three batches of `size` prompts: in order, reversed, shuffled."""
    mixed = torch.randperm(NUM_PROMPTS, generator=torch.Generator().manual_seed(size)).tolist()
    return [list(range(size)), list(range(20, 20 + size))[::-1], mixed[:size]]


@pytest.mark.by_default(size=(5,), strategy=FEW_STRATEGIES)
@pytest.mark.smoke
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 5, 16])
def test_batches_of_any_size_and_order(size: int, strategy: str) -> None:
    for name, rows in zip(("llama", "gemma3", "llama"), orders(size), strict=True):
        check_batch(name, strategy, rows)


@pytest.mark.by_default(strategy=("falcon",))
@pytest.mark.parametrize("batching", [name for name in BATCHING if name != "unpadded"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_way_to_pad_is_exact(strategy: str, batching: str) -> None:
    gained = 0
    for name, rows in zip(MODELS, [*orders(5), [4, 7, 0, 12]], strict=True):
        if not tiny_models.is_served(name, strategy):
            continue
        if name == "falcon_alibi" and batching == "unpadded_input":
            with pytest.raises(UnsupportedError, match="takes no attention function"):
                check_batch(name, strategy, rows, batching)
            continue
        stats = check_batch(name, strategy, rows, batching).spec_stats
        gained += stats.accepted_tokens
        packed = name != "falcon_alibi"
        assert (stats.target_padding > 0) == (BATCHING[batching].pads_inputs or not packed)
    assert gained > 0 or strategy == "none"


def test_padding_does_not_change_what_is_counted() -> None:
    """The padding ratio depends only on accepted tokens; `target_tokens` depends on batching."""
    found = {
        batching: check_batch("llama", "tree", [0, 1, 2, 3, 4], batching).spec_stats
        for batching in BATCHING
    }
    unpadded, padded = found["unpadded"], found["padded"]
    assert unpadded.padding_ratio > 0
    for stats in found.values():
        assert stats.rows == unpadded.rows
        assert stats.target_forwards == unpadded.target_forwards
        assert stats.uneven_tokens == unpadded.uneven_tokens
    assert found["unpadded_input"].target_tokens == unpadded.target_tokens
    assert found["unpadded_kv"].target_tokens == padded.target_tokens
    assert padded.target_tokens - padded.target_padding == unpadded.target_tokens


@pytest.mark.smoke
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("strategy", ["lookup", "tree"])
def test_a_cache_goes_on_in_the_next_turn(strategy: str, batching: str) -> None:
    """A padded call leaves a user's cache without gaps, and can resume from one."""
    model = tiny_models.build("llama")
    rows = [torch.tensor(prompts("llama")[row]) for row in (0, 3, 8)]
    batch = tiny_models.left_padded(rows)
    call = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    speculation = arguments("llama", strategy, batching)
    first = model.generate(**batch, **call, **speculation)
    more = torch.tensor([[11, 12], [13, 14], [15, 16]])
    ids = torch.cat([first.sequences, more], dim=1)
    mask = torch.nn.functional.pad(batch["attention_mask"], (0, 10), value=1)
    again = {"input_ids": ids, "attention_mask": mask}
    expected = model.generate(**again, **call).sequences
    second = model.generate(
        **again,
        **call,
        **{CACHE_NAME: output_cache(first)},
        **speculation,
    )
    assert_identical(model, {**again, **call, **speculation}, second, expected)


@pytest.mark.parametrize("strategy", known_strategies())
def test_every_strategy_has_the_option(strategy: str) -> None:
    config_class = type(parse_strategy(strategy))
    assert config_class().batching == "unpadded"
    for name in BATCHING:
        config = config_class(batching=name)
        assert parse_strategy(config.to_dict()) == config
    for wrong in ("Padded", None, 3, ["padded"]):
        with pytest.raises(OptionError, match=r"known: unpadded, unpadded_kv"):
            config_class(batching=wrong)


def test_the_option_is_named() -> None:
    """Configs with positional arguments keep their meaning."""
    assert LookupConfig(3).match_length == 3


@pytest.mark.by_default(name=("llama",), strategy=("lookup", "falcon"))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_forty_prompts_on_six_slots(name: str, strategy: str) -> None:
    if not tiny_models.is_served(name, strategy):
        pytest.skip("Falcon heads run on models with the attention interface alone")
    model = tiny_models.build(name)
    call = {
        "max_new_tokens": NEW_TOKENS,
        "do_sample": False,
        "eos_token_id": list(ends(name)),
        "max_batch": SLOTS,
        **tiny_models.speculation(name, strategy),
    }
    outputs = model.generate_batch(prompts(name), **call)
    answers = [output.generated_tokens for output in outputs.values()]
    assert_identical_answers(model, prompts(name), call, answers, alone(name, ends(name)))
    assert len({len(answer) for answer in alone(name, ends(name))}) > 2
    stats = outputs.spec_stats
    steps = sum(row.target_forwards for row in stats.rows)
    assert stats.target_forwards < steps / 4, "slots stand empty"
    assert strategy == "none" or stats.accepted_tokens > 0
