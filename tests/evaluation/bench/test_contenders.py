"""Contenders: outputs equal to plain `generate()`, and counts of forward passes."""

from __future__ import annotations

import copy
import importlib.util
from itertools import chain
from typing import Any

import pytest
import torch

import hf_spec
from hf_spec import (
    LookupConfig,
    TreeConfig,
    UnsupportedError,
)
from hf_spec.common.prompts import Prompt
from hf_spec.drafting.length_policy import DraftedToken
from hf_spec.evaluation.bench import contenders as ways
from hf_spec.evaluation.bench.contenders import (
    GREEDY,
    BaselineOutputs,
    OraclePolicy,
    oracle,
    synthetic,
)
from hf_spec.evaluation.bench.runner import Plan, time_contenders
from tests.model_watch import count_forwards
from tests.tiny_models import draft_model, ragged_batch, repetitive_prompt, settled_prompt

NEW_TOKENS = 20


def test_plain_takes_one_forward_per_token(model: Any) -> None:
    ids = settled_prompt("llama")
    run = ways.plain(model).run(ids, NEW_TOKENS)
    expected = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)
    assert torch.equal(run.sequence, expected[0])
    assert run.target_forwards == NEW_TOKENS
    assert run.stats is None


def test_the_hook_that_counts_is_gone_afterwards(model: Any) -> None:
    hooks = len(model._forward_pre_hooks)
    contender = ways.plain(model)
    contender.run(settled_prompt("llama"), 2)
    with pytest.raises(TypeError):
        contender.run(settled_prompt("llama"), "three")  # type: ignore[arg-type]
    assert len(model._forward_pre_hooks) == hooks


def test_the_others_agree_with_plain(model: Any) -> None:
    ids, draft = settled_prompt("llama"), draft_model("llama")
    expected = ways.plain(model).run(ids, NEW_TOKENS).sequence
    lookup = {**GREEDY, "prompt_lookup_num_tokens": 5, "max_matching_ngram_size": 2}
    contenders = [
        ways.transformers("lookup of others", model, lookup, batches=False),
        ways.transformers("assistant", model, {**GREEDY, "assistant_model": copy.deepcopy(draft)}),
        ways.strategy(model, LookupConfig()),
        ways.strategy(model, TreeConfig(), draft),
    ]
    assert [c.name for c in contenders] == [
        "lookup of others",
        "assistant",
        "lookup",
        "tree",
    ]
    for contender in contenders:
        with count_forwards(model) as calls:
            run = contender.run(ids, NEW_TOKENS)
        assert torch.equal(run.sequence, expected), contender.name
        assert run.target_forwards == len(calls) > 0
        assert contender.prepare is None


def test_a_strategy_tells_its_statistics(model: Any) -> None:
    contender = ways.strategy(model, LookupConfig(), name="ours")
    run = contender.run(settled_prompt("llama"), NEW_TOKENS)
    assert contender.name == "ours"
    assert run.stats is not None
    assert run.stats.target_forwards == run.target_forwards
    assert run.stats.accepted_tokens > 0


def test_economize(model: Any) -> None:
    contender = ways.economize_lookup(copy.deepcopy(model), 2, 5)
    if importlib.util.find_spec("economize") is None:
        assert contender is None
        pytest.skip("economize is not installed")
    assert contender is not None
    assert contender.prepare is not None
    assert not contender.batches
    ids = settled_prompt("llama")
    run = contender.run(ids, NEW_TOKENS)
    assert torch.equal(run.sequence, ways.plain(model).run(ids, NEW_TOKENS).sequence)
    assert 0 < (contender.prepare(ids, NEW_TOKENS, None) or 0) <= NEW_TOKENS


def test_padded_rows_are_generated_as_if_alone(model: Any) -> None:
    batch = ragged_batch((9, 5, 7))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    expected = BaselineOutputs(ways.plain(model))(ids, NEW_TOKENS, mask)
    for contender in (
        ways.plain(model),
        ways.strategy(model, LookupConfig()),
        ways.strategy(model, TreeConfig(), draft_model("llama")),
    ):
        run = contender.run(ids, NEW_TOKENS, mask)
        assert run.sequences[:, ids.shape[1] :].tolist() == expected, contender.name
        assert contender.batches


def test_sampling_is_a_setting(model: Any) -> None:
    ids = settled_prompt("llama")
    settings = {"do_sample": True, "temperature": 2.0}
    for contender in (
        ways.plain(model, settings),
        ways.transformers("lookup", model, {**settings, "prompt_lookup_num_tokens": 5}),
        ways.strategy(model, LookupConfig(), settings=settings),
    ):
        outputs = set()
        for seed in range(4):
            torch.manual_seed(seed)
            outputs.add(tuple(contender.run(ids, NEW_TOKENS).sequence.tolist()))
        assert len(outputs) > 1, contender.name


class TestCompiled:
    @pytest.fixture
    def compiles(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Record the functions passed to `torch.compile`, and skip its slow code generation."""
        made: list[Any] = []
        compile_ = torch.compile

        def traced(function: Any, **options: Any) -> Any:
            made.append(function)
            return compile_(function, backend="eager")

        monkeypatch.setattr(torch, "compile", traced)
        return made

    @pytest.mark.full
    def test_it_says_what_plain_says(self, model: Any, compiles: list[Any]) -> None:
        model = copy.deepcopy(model)
        contender = ways.compiled(model)
        ids = settled_prompt("llama")
        run = contender.run(ids, 6, torch.ones_like(ids))
        assert torch.equal(run.sequence, ways.plain(model).run(ids, 6).sequence)
        assert run.target_forwards == 6
        assert len(compiles) == 1
        assert contender.compiles

    def test_what_cannot_be_compiled_is_said_before_anything_is_timed(
        self, model: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no C++ compiler")

        monkeypatch.setattr(torch, "compile", broken)
        with pytest.raises(UnsupportedError, match=r"cannot be compiled here.*no C\+\+ compiler"):
            ways.compiled(copy.deepcopy(model))


NEW_TOKENS = 24
SYNTHETIC_TOKENS = 40


def expected_rounds(model: Any, draft: Any, ids: torch.Tensor) -> list[tuple[int, int]]:
    """Return (drafted, accepted) of each round, from plain greedy generation of both models."""
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
    # The oracle records the warm-up and each prompt once, before the timed runs.
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


@pytest.mark.full
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
