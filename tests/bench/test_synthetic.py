"""Drafts without a drafter: accepted as often as was asked, and the output is the target's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_spec.bench.contenders import PlainAnswers
from hf_spec.bench.synthetic import synthetic
from tests.tiny_models import ragged_batch, settled_prompt

NEW_TOKENS = 40


@pytest.mark.parametrize("length", [1, 4])
def test_the_extremes(model: Any, length: int) -> None:
    ids = settled_prompt("llama")
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    always = synthetic(model, 1.0, length).run(ids, NEW_TOKENS)
    never = synthetic(model, 0.0, length).run(ids, NEW_TOKENS)
    assert torch.equal(always.sequences, expected)
    assert torch.equal(never.sequences, expected)
    assert always.target_forwards == NEW_TOKENS // (length + 1)
    assert never.target_forwards == NEW_TOKENS
    assert never.stats is not None
    assert never.stats.drafted_tokens > 0 == never.stats.accepted_tokens


def test_acceptance_is_what_was_asked_at_every_position(model: Any) -> None:
    contender = synthetic(model, 0.7, 3)
    accepted, drafted = [0, 0, 0], [0, 0, 0]
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(3, 90, (1, 8), generator=generator)
        run = contender.run(ids, 60)
        assert run.sequence.tolist() == [*ids[0].tolist(), *PlainAnswers(model)(ids, 60)[0]]
        assert run.stats is not None
        for position in range(3):
            accepted[position] += run.stats.accepted_by_position[position]
            drafted[position] += run.stats.drafted_by_position[position]
    shares = [a / d for a, d in zip(accepted, drafted, strict=True)]
    assert shares == pytest.approx([0.7, 0.49, 0.343], abs=0.08)


def test_a_run_repeats_itself_and_its_name_says_what_it_is(model: Any) -> None:
    contender = synthetic(model, 0.5, 3)
    ids = settled_prompt("llama")
    first, second = (contender.run(ids, NEW_TOKENS) for _ in range(2))
    assert first.stats is not None
    assert second.stats is not None
    assert first.stats.rows == second.stats.rows
    assert contender.name == "synthetic, 3 tokens, acceptance 0.5"


def test_rows_of_a_padded_batch(model: Any) -> None:
    batch = ragged_batch((9, 4))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    contender = synthetic(model, 1.0, 4)
    run = contender.run(ids, 20, mask)
    assert run.sequences[:, ids.shape[1] :].tolist() == PlainAnswers(model)(ids, 20, mask)
    assert run.target_forwards == 4
