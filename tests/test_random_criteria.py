"""Random calls with stopping criteria of every kind match plain `generate()`.

See `tests.criteria.compare` for what is compared.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import StoppingCriteriaList

from tests import criteria, tiny_models
from tests.identity import assert_identical

MODELS = ("llama", "gemma3", "bloom", "gpt2")
FEW, MANY = 12, 300


def random_prompts(draw: random.Random, name: str) -> list[Tensor]:
    """Return ragged prompts: parts of a text in which drafts are accepted, and random patterns."""
    settled = tiny_models.settled_prompt(name)[0]
    rows = []
    for _ in range(draw.choice([1, 2, 3, 3, 5])):
        if draw.random() < 0.6:
            start = draw.randrange(20)
            rows.append(settled[start : draw.randrange(start + 2, len(settled) + 1)])
        else:
            period, length = draw.randrange(1, 5), draw.randrange(1, 15)
            pattern = [draw.randrange(3, tiny_models.VOCAB) for _ in range(period)]
            rows.append(torch.tensor((pattern * length)[:length]))
    return rows


def likely_tokens(draw: random.Random, said: Tensor, count: int) -> list[int]:
    return draw.sample(sorted(set(said.flatten().tolist())), k=min(count, len(said.unique())))


def random_criterion(draw: random.Random, said: Tensor) -> criteria.Recording:
    """Return a criterion that probably shortens `said`, the (B, T) plain output without it."""
    steps = draw.randrange(1, said.shape[1] + 2)
    few = likely_tokens(draw, said, draw.randrange(1, 4))
    return draw.choice(
        [
            criteria.Recording(),
            criteria.AfterCalls(steps),
            criteria.RaiseAtCall(steps),
            criteria.AnyRowSays(few[:1]),
            criteria.RowSays(few, draw.randrange(len(said))),
            criteria.EachRowSays(few),
            criteria.EachRowHasSaid(few),
            criteria.SumOfBatch(draw.randrange(2, 12)),
            criteria.LongestRun(draw.randrange(2, 9)),
            criteria.Confident(draw.choice([0.05, 0.1, 0.3])),
        ]
    )


def random_options(draw: random.Random, said: Tensor) -> dict[str, Any]:
    """Return options in addition to the criteria: EOS, stop strings, a penalty, outputs."""
    options: dict[str, Any] = {"max_new_tokens": said.shape[1], "do_sample": False}
    if draw.random() < 0.5:
        options["eos_token_id"] = likely_tokens(draw, said, draw.randrange(1, 3))
        options["pad_token_id"] = draw.choice([0, 5])
    if draw.random() < 0.3:
        words = tiny_models.tokenizer().decode(said[draw.randrange(len(said)), 2:4])
        options |= {"stop_strings": [words], "tokenizer": tiny_models.tokenizer()}
    if draw.random() < 0.3:
        options["repetition_penalty"] = 1.2
    if draw.random() < 0.5:
        options["return_dict_in_generate"] = True
        wanted = draw.choice([("output_scores",), ("output_scores", "output_logits"), ()])
        options |= dict.fromkeys(wanted, True)
    return options


def check_generate(draw: random.Random, name: str, strategy: str) -> None:
    model = tiny_models.build(name)
    given = tiny_models.left_padded(random_prompts(draw, name))
    width = given["input_ids"].shape[1]
    free = model.generate(**given, max_new_tokens=draw.randrange(4, 26), do_sample=False)
    said = free[:, width:]
    given |= random_options(draw, said)
    rules: list[Any] = [random_criterion(draw, said) for _ in range(draw.choice([1, 1, 2]))]
    criteria.compare(model, given, rules, tiny_models.speculation(name, strategy))


def check_batch(draw: random.Random, name: str, strategy: str) -> None:
    """Check that each sequence is a batch of one with its own copies of the criteria."""
    model = tiny_models.build(name)
    prompts = [prompt.tolist() for prompt in random_prompts(draw, name)]
    length = draw.randrange(4, 20)
    said = model.generate(torch.tensor(prompts[:1]), max_new_tokens=length, do_sample=False)
    rules: list[Any] = [random_criterion(draw, said[:, len(prompts[0]) :])]
    if isinstance(rules[0], criteria.RaiseAtCall):
        rules = [criteria.AfterCalls(rules[0].count)]
    options: dict[str, Any] = {"max_new_tokens": length, "do_sample": False}
    if draw.random() < 0.5:
        options["eos_token_id"] = likely_tokens(draw, said[:, len(prompts[0]) :], 2)
    speculation = tiny_models.speculation(name, strategy)
    outputs = model.generate_batch(
        prompts,
        stopping_criteria=StoppingCriteriaList(rules),
        max_batch=draw.randrange(1, 4),
        **options,
        **speculation,
    )
    for prompt, output in zip(prompts, outputs.values(), strict=True):
        ids = torch.tensor([prompt])
        alone = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **options}
        expected, _, _ = criteria.run(model, alone, rules)
        sequence = [*prompt, *output.generated_tokens]
        assert_identical(model, {**alone, **speculation}, [sequence], expected)
        assert output.spec_stats.new_tokens == len(output.generated_tokens)
    assert rules[0].calls == [], "sequences have copies"


def check_case(number: int) -> None:
    draw = random.Random(number)
    name = MODELS[number % len(MODELS)]
    served = [s for s in tiny_models.STRATEGIES if tiny_models.is_served(name, s)]
    strategy = served[number // len(MODELS) % len(served)]
    (check_batch if number % 5 == 4 else check_generate)(draw, name, strategy)


@pytest.mark.full
@pytest.mark.parametrize("number", range(FEW))
def test_a_few_random_cases(number: int) -> None:
    check_case(number)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(FEW, FEW + MANY))
def test_many_random_cases(number: int) -> None:
    check_case(number)
