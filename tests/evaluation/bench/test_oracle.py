"""Drafters that know the answer: the oracle stops at its first mismatch, synthetic drafts are
accepted as often as was asked. No config can name them, and the output is the target's own.
"""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec.common.prompts import Prompt
from hf_spec.drafting.length_policy import DraftedToken
from hf_spec.evaluation.bench import contenders as ways
from hf_spec.evaluation.bench.contenders import BaselineOutputs
from hf_spec.evaluation.bench.oracle import OraclePolicy, oracle, synthetic
from hf_spec.evaluation.bench.runner import Plan, time_contenders
from tests.tiny_models import draft_model, ragged_batch, repetitive_prompt, settled_prompt

NEW_TOKENS = 24
SYNTHETIC_TOKENS = 40


def expected_rounds(model: Any, draft: Any, ids: torch.Tensor) -> list[tuple[int, int]]:
    """(drafted, accepted) of each round, from plain greedy generation of both models."""
    sequence = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    rounds, at, end = [], ids.shape[1], sequence.shape[1]
    while at < end:
        room = end - at - 1
        drafted = accepted = 0
        text = sequence[:, :at]
        while drafted < room and drafted == accepted:
            with torch.no_grad():
                token = int(draft(text).logits[0, -1].argmax())
            drafted += 1
            accepted += token == int(sequence[0, at + drafted - 1])
            text = sequence[:, : at + drafted]
        rounds.append((drafted, accepted))
        at += accepted + 1
    return rounds


def test_it_drafts_until_its_first_mismatch(model: Any) -> None:
    draft, ids = draft_model("llama"), settled_prompt("llama")
    rounds = expected_rounds(model, draft, ids)
    run = oracle(model, draft).run(ids, NEW_TOKENS)
    assert run.stats is not None
    assert run.target_forwards == len(rounds)
    assert run.stats.drafted_tokens == sum(drafted for drafted, _ in rounds)
    assert run.stats.accepted_tokens == sum(accepted for _, accepted in rounds) > 0
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(run.sequence, expected[0])


def test_no_length_is_too_long_for_it(model: Any) -> None:
    run = oracle(model, copy.deepcopy(model)).run(repetitive_prompt(), NEW_TOKENS)
    assert run.target_forwards == 1
    assert run.stats is not None
    assert run.stats.accepted_tokens == NEW_TOKENS - 1


@pytest.mark.parametrize("length", [1, 3, 8])
def test_no_static_length_needs_fewer_forwards_of_both(model: Any, length: int) -> None:
    draft, ids = draft_model("llama"), settled_prompt("llama")
    best = oracle(model, draft).run(ids, NEW_TOKENS)
    other = ways.strategy(model, hf_spec.DraftConfig(max_draft_tokens=length), draft)
    stats = other.run(ids, NEW_TOKENS).stats
    assert best.stats is not None
    assert stats is not None
    assert best.stats.target_forwards <= stats.target_forwards
    assert best.stats.drafted_tokens - best.stats.accepted_tokens <= best.stats.target_forwards


def test_each_row_has_its_own_answer() -> None:
    policy = OraclePolicy([[4, 5], [6]])
    newest = [
        DraftedToken(0, 4, 0, 1.0),
        DraftedToken(1, 5, 0, 1.0),
        DraftedToken(0, 5, 1, 1.0),
        DraftedToken(1, 6, 1, 1.0),
    ]
    assert policy.goes_on(newest) == [True, False, True, False]


def test_it_is_measured_without_the_time_of_its_recording(
    model: Any, prompts: list[Prompt], tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain: list[int] = []
    generate = type(model).generate

    def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
        plain.append("custom_generate" not in kwargs)
        return generate(self, *args, **kwargs)

    monkeypatch.setattr(type(model), "generate", watch)
    contenders = [oracle(model, draft_model("llama"))]
    records = list(
        chain.from_iterable(time_contenders(contenders, prompts, tokenizer, Plan(20, 2)))
    )
    # The warm-up and every prompt: recorded once each, before the runs that are timed.
    assert plain == [True, False] + 2 * [True, False, False]
    assert all(r.target_forwards and r.identical for r in records)


def test_it_knows_every_row_of_a_batch(model: Any) -> None:
    ids = torch.cat([settled_prompt("llama"), settled_prompt("llama").flip(1)])
    contender = oracle(model, copy.deepcopy(model))
    run = contender.run(ids, NEW_TOKENS, torch.ones_like(ids))
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(run.sequences, expected)
    assert run.target_forwards == 1


def test_no_config_can_name_it() -> None:
    with pytest.raises(hf_spec.OptionError, match="unknown length_policy 'oracle'"):
        hf_spec.DraftConfig(length_policy="oracle")


@pytest.mark.parametrize("length", [1, 4])
def test_the_extremes(model: Any, length: int) -> None:
    ids = settled_prompt("llama")
    expected = model.generate(ids, max_new_tokens=SYNTHETIC_TOKENS, do_sample=False)
    always = synthetic(model, 1.0, length).run(ids, SYNTHETIC_TOKENS)
    never = synthetic(model, 0.0, length).run(ids, SYNTHETIC_TOKENS)
    assert torch.equal(always.sequences, expected)
    assert torch.equal(never.sequences, expected)
    assert always.target_forwards == SYNTHETIC_TOKENS // (length + 1)
    assert never.target_forwards == SYNTHETIC_TOKENS
    assert never.stats is not None
    assert never.stats.drafted_tokens > 0 == never.stats.accepted_tokens


def test_acceptance_is_what_was_asked_at_every_position(model: Any) -> None:
    contender = synthetic(model, 0.7, 3)
    accepted, drafted = [0, 0, 0], [0, 0, 0]
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 90, (1, 8), generator=generator)
        run = contender.run(ids, 60)
        assert run.sequence.tolist() == [
            *ids[0].tolist(),
            *BaselineOutputs(ways.plain(model))(ids, 60)[0],
        ]
        assert run.stats is not None
        for position in range(3):
            accepted[position] += run.stats.accepted_by_position[position]
            drafted[position] += run.stats.drafted_by_position[position]
    shares = [a / d for a, d in zip(accepted, drafted, strict=True)]
    assert shares == pytest.approx([0.7, 0.49, 0.343], abs=0.08)


def test_a_run_repeats_itself_and_its_name_says_what_it_is(model: Any) -> None:
    contender = synthetic(model, 0.5, 3)
    ids = settled_prompt("llama")
    first, second = (contender.run(ids, SYNTHETIC_TOKENS) for _ in range(2))
    assert first.stats is not None
    assert second.stats is not None
    assert first.stats.rows == second.stats.rows
    assert contender.name == "synthetic, 3 tokens, acceptance 0.5"


def test_rows_of_a_padded_batch(model: Any) -> None:
    batch = ragged_batch((9, 4))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    contender = synthetic(model, 1.0, 4)
    run = contender.run(ids, 20, mask)
    assert run.sequences[:, ids.shape[1] :].tolist() == BaselineOutputs(ways.plain(model))(
        ids, 20, mask
    )
    assert run.target_forwards == 4
