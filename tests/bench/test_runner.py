"""Measuring: the order of the calls, and what a record says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from hf_spec import LookupConfig
from hf_spec.bench.contenders import Contender, Run, plain, strategy
from hf_spec.bench.prompts import Prompt
from hf_spec.bench.runner import Record, environment, measure, to_json

NEW_TOKENS = 6


def named(name: str, calls: list[Any], ending: int = 5, counts: bool = False) -> Contender:
    """Appends the token `ending` to every prompt and writes down who was called."""

    def run(ids: Tensor, new_tokens: int) -> Run:
        calls.append((name, ids.shape[1], new_tokens))
        return Run(torch.cat([ids[0], torch.tensor([ending] * new_tokens)]))

    return Contender(name, run, (lambda ids, new: 100 + new) if counts else None)


def measured(*arguments: Any) -> list[Record]:
    return list(chain.from_iterable(measure(*arguments)))


def names(calls: Sequence[Any]) -> str:
    return "".join(name for name, *_ in calls)


class TestOrder:
    def test_contenders_take_turns_and_rotate(self, prompts: list[Prompt], tokenizer: Any) -> None:
        calls: list[Any] = []
        measured([named(n, calls) for n in "abc"], prompts, tokenizer, NEW_TOKENS, 4)
        # A warm-up, then for both prompts four rounds.
        assert names(calls) == "abc" + 2 * ("abc" + "bca" + "cab" + "abc")
        lengths = [length for _, length, _ in calls]
        assert lengths == [7] * (3 + 12) + [6] * 12

    def test_the_warm_up_is_short_and_leaves_no_record(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        calls: list[Any] = []
        records = measured([named("a", calls)], prompts, tokenizer, 40, 2)
        assert [new for *_, new in calls] == [16, 40, 40, 40, 40]
        assert len(records) == 4

    def test_progress_is_told_after_every_timed_call(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        ticks: list[int] = []
        contenders = [named(n, []) for n in "ab"]
        measured(contenders, prompts, tokenizer, 2, 3, lambda: ticks.append(1))
        assert len(ticks) == 2 * 2 * 3


class TestRecords:
    def test_difference_counts_and_ratio(self, prompts: list[Prompt], tokenizer: Any) -> None:
        contenders = [named("a", []), named("b", [], ending=6), named("c", [], counts=True)]
        records = measured(contenders, prompts[:1], tokenizer, NEW_TOKENS, 2)
        assert [(r.contender, r.repeat) for r in records] == [
            *((n, 0) for n in "abc"),
            *((n, 1) for n in "bca"),
        ]
        assert {(r.contender, r.identical) for r in records} == {
            ("a", True),
            ("b", False),
            ("c", True),
        }
        assert {(r.contender, r.target_forwards) for r in records} == {
            ("a", None),
            ("b", None),
            ("c", 106),
        }
        for repeat in range(2):
            group = {r.contender: r for r in records if r.repeat == repeat}
            assert {r.plain_seconds for r in group.values()} == {group["a"].seconds}
            assert group["a"].ratio == 1
            assert group["b"].ratio == group["a"].seconds / group["b"].seconds

    def test_each_prompt_is_told_as_soon_as_it_is_done(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        calls: list[Any] = []
        told = measure([named(n, calls) for n in "ab"], prompts, tokenizer, NEW_TOKENS, 2)
        assert [(r.prompt, r.repeat) for r in next(told)] == 2 * [("count-1", 0)] + 2 * [
            ("count-1", 1)
        ]
        assert names(calls) == "ab" + "abba"
        assert {r.prompt for r in next(told)} == {"letters-1"}
        assert list(told) == []

    def test_real_contenders(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        contenders = [plain(model), strategy(model, LookupConfig())]
        records = measured(contenders, prompts, tokenizer, NEW_TOKENS, 1)
        assert [r.prompt for r in records] == ["count-1"] * 2 + ["letters-1"] * 2
        assert all(r.identical and r.new_tokens == NEW_TOKENS for r in records)
        ours = records[1]
        assert ours.tau is not None
        assert ours.stats is not None
        assert ours.seconds > ours.stats.verify_seconds > 0
        parts = ours.stats.draft_seconds, ours.stats.verify_seconds, ours.stats.other_seconds
        # What lies before and after the loop is a few milliseconds, much of a call this small.
        assert ours.seconds / 2 < sum(parts) <= ours.seconds
        assert ours.stats.drafted_tokens >= sum(ours.stats.accepted_by_position)
        assert records[0].tau is None
        assert records[0].target_forwards == NEW_TOKENS >= (ours.target_forwards or 0)


def test_environment_and_json() -> None:
    record = Record("p", "t", "a", 0, 1.0, 2.0, 3, None, True)
    written = json.loads(json.dumps(to_json([record], command="x")))
    assert written["command"] == "x"
    assert written["environment"] == environment()
    assert written["environment"]["torch"] == torch.__version__
    assert written["records"][0]["plain_seconds"] == 2.0
    assert Record(**written["records"][0]) == record
