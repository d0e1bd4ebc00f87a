"""Timed runs: the order of the calls, and the contents of the records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import LookupConfig
from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.common.prompts import Prompt
from hf_spec.evaluation.bench.contenders import Contender, Run, plain, strategy
from hf_spec.evaluation.bench.runner import (
    Plan,
    Record,
    Row,
    peak_bytes,
    reset_peak,
    rotated,
    time_contenders,
)

NEW_TOKENS = 6


def test_every_item_has_every_place_in_turn() -> None:
    assert [rotated("abc", turn) for turn in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


def named(
    name: str, calls: list[Any], ending: int = 5, counts: bool = False, **more: Any
) -> Contender:
    """Return a contender that appends the token `ending` to every prompt and logs its calls."""

    def run(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        calls.append((name, ids.shape[1], new_tokens))
        return Run(torch.cat([ids, torch.full((len(ids), new_tokens), ending)], dim=1))

    prepare = (lambda ids, new, mask: 100 + new) if counts else None
    return Contender(name, run, prepare, **more)


def measured(
    contenders: list[Contender],
    prompts: list[Prompt],
    tokenizer: Any,
    plan: Plan,
    *progress: Any,
) -> list[Record]:
    return list(
        chain.from_iterable(time_contenders(contenders, prompts, tokenizer, plan, *progress))
    )


def names(calls: Sequence[Any]) -> str:
    return "".join(name for name, *_ in calls)


class TestOrder:
    def test_contenders_take_turns_and_rotate(self, prompts: list[Prompt], tokenizer: Any) -> None:
        calls: list[Any] = []
        measured([named(n, calls) for n in "abc"], prompts, tokenizer, Plan(NEW_TOKENS, 4))
        # One warm-up, then four rounds per prompt.
        assert names(calls) == "abc" + 2 * ("abc" + "bca" + "cab" + "abc")
        lengths = [length for _, length, _ in calls]
        assert lengths == [7] * (3 + 12) + [6] * 12

    def test_the_warm_up_is_short_and_leaves_no_record(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        calls: list[Any] = []
        records = measured([named("a", calls)], prompts, tokenizer, Plan(40, 2))
        assert [new for *_, new in calls] == [16, 40, 40, 40, 40]
        assert len(records) == 4

    def test_progress_is_told_after_every_timed_call(
        self, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        ticks: list[int] = []
        contenders = [named(n, []) for n in "ab"]
        measured(contenders, prompts, tokenizer, Plan(2, 3), lambda: ticks.append(1))
        assert len(ticks) == 2 * 2 * 3


class TestRecords:
    def test_difference_counts_and_ratio(self, prompts: list[Prompt], tokenizer: Any) -> None:
        contenders = [named("a", []), named("b", [], ending=6), named("c", [], counts=True)]
        records = measured(contenders, prompts[:1], tokenizer, Plan(NEW_TOKENS, 2))
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
        told = time_contenders(
            [named(n, calls) for n in "ab"], prompts, tokenizer, Plan(NEW_TOKENS, 2)
        )
        assert [(r.prompt, r.repeat) for r in next(told)] == 2 * [("count-1", 0)] + 2 * [
            ("count-1", 1)
        ]
        assert names(calls) == "ab" + "abba"
        assert {r.prompt for r in next(told)} == {"letters-1"}
        assert list(told) == []

    def test_real_contenders(self, model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
        contenders = [plain(model), strategy(model, LookupConfig())]
        records = measured(contenders, prompts, tokenizer, Plan(NEW_TOKENS, 1))
        assert [r.prompt for r in records] == ["count-1"] * 2 + ["letters-1"] * 2
        assert all(r.identical and r.new_tokens == NEW_TOKENS for r in records)
        ours = records[1]
        assert ours.tau is not None
        assert ours.stats is not None
        assert ours.seconds > ours.stats.verify_seconds > 0
        parts = ours.stats.draft_seconds, ours.stats.verify_seconds, ours.stats.other_seconds
        # The time before and after the loop is a few milliseconds, much of so short a call.
        assert ours.seconds / 2 < sum(parts) <= ours.seconds
        assert ours.stats.drafted_tokens >= sum(ours.stats.accepted_by_position)
        assert records[0].tau is None
        assert records[0].target_forwards == NEW_TOKENS >= (ours.target_forwards or 0)


class TestBatches:
    def test_every_row_is_compared_with_its_prompt_alone(
        self, model: Any, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        reference = plain(model)

        def last_row_wrong(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
            run = reference.run(ids, new_tokens, mask)
            run.sequences[-1, -1] += 1
            return run

        contenders = [reference, strategy(model, LookupConfig()), Contender("x", last_row_wrong)]
        records = measured(contenders, prompts, tokenizer, Plan(NEW_TOKENS, 1, batch_size=2))
        rows = {r.contender: [(row.task, row.identical) for row in r.rows] for r in records}
        assert rows["plain"] == rows["lookup"] == [("count", True), ("letters", True)]
        assert rows["x"] == [("count", True), ("letters", False)]
        assert [r.identical for r in records] == [True, True, False]
        assert {r.new_tokens for r in records} == {2 * NEW_TOKENS}
        assert records[0].target_forwards == NEW_TOKENS

    def test_padding_after_an_end_is_no_output(self, prompts: list[Prompt], tokenizer: Any) -> None:
        plan = Plan(NEW_TOKENS, 1, batch_size=2, ends=frozenset([5]))
        (record,) = measured([named("a", [])], prompts, tokenizer, plan)
        assert record.new_tokens == 2
        assert record.plain_seconds == record.seconds

    def test_fewer_tokens_count_as_fewer(self, prompts: list[Prompt], tokenizer: Any) -> None:
        plan = Plan(NEW_TOKENS, 1, ends=frozenset([6]))
        contenders = [named("a", []), named("b", [], ending=6)]
        full, short = measured(contenders, prompts[:1], tokenizer, plan)
        assert (full.new_tokens, short.new_tokens) == (NEW_TOKENS, 1)
        assert short.plain_seconds == pytest.approx(full.seconds / NEW_TOKENS)


class TestSampling:
    def test_outputs_are_seeded_and_not_compared(
        self, model: Any, prompts: list[Prompt], tokenizer: Any
    ) -> None:
        drawn: list[list[int]] = []

        def draw(ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
            tokens = torch.randint(0, 9, (len(ids), new_tokens))
            drawn.append(tokens[0].tolist())
            return Run(torch.cat([ids, tokens], dim=1))

        contenders = [Contender(name, draw) for name in "ab"]
        records = measured(contenders, prompts[:1], tokenizer, Plan(NEW_TOKENS, 2, seed=3))
        first, second = drawn[2:4], drawn[4:6]
        assert first[0] == first[1] != second[0] == second[1]
        assert {r.identical for r in records} == {None}
        assert {row.identical for r in records for row in r.rows} == {None}


def test_what_compiles_is_warmed_up_at_full_length(prompts: list[Prompt], tokenizer: Any) -> None:
    calls: list[Any] = []
    measured([named("a", calls, compiles=True)], prompts, tokenizer, Plan(40, 1))
    assert [new for *_, new in calls] == [40, 40, 40]


def test_the_longest_prompt_warms_up(prompts: list[Prompt], tokenizer: Any) -> None:
    calls: list[Any] = []
    measured([named("a", calls)], prompts[::-1], tokenizer, Plan(2, 1))
    assert [length for _, length, _ in calls] == [7, 6, 7]


def test_a_record_as_json() -> None:
    counted = RowStats(4, 6, 2, 6, [3, 3], [1, 1])
    stats = SpecStats([counted], draft_seconds=0.25, verify_seconds=0.5, counters={"rounds": 4})
    record = Record("p", "t", "a", 0, 1.0, 2.0, 3, 4, True, stats, 1, (Row("p", "t", True),))
    assert (record.ratio, record.tokens_per_second, record.tau) == (2.0, 3.0, 0.5)
    assert json.loads(json.dumps(record.to_dict())) == {
        "prompt": "p",
        "task": "t",
        "contender": "a",
        "repeat": 0,
        "seconds": 1.0,
        "plain_seconds": 2.0,
        "new_tokens": 3,
        "target_forwards": 4,
        "identical": True,
        "stats": {
            "tau": 0.5,
            "drafted_tokens": 6,
            "draft_forwards": 0,
            "draft_seconds": 0.25,
            "verify_seconds": 0.5,
            "other_seconds": 0.0,
            "accepted_by_position": [1, 1],
            "counters": {"rounds": 4},
            "drafted_by_position": [3, 3],
        },
        "batch_size": 1,
        "rows": [{"prompt": "p", "task": "t", "identical": True}],
        "peak_bytes": None,
    }
    assert Record("p", "t", "a", 0, 1.0, 2.0, 3, None, True).to_dict()["stats"] is None


CPU = torch.device("cpu")
BLOCK_BYTES = 1 << 28


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peaks are read from /proc")
def test_a_block_that_was_held_for_a_while() -> None:
    reset_peak(CPU)
    before = peak_bytes(CPU)
    block = torch.ones(BLOCK_BYTES // 4)
    del block
    held = peak_bytes(CPU)
    reset_peak(CPU)
    after = peak_bytes(CPU)
    assert before is not None
    assert held is not None
    assert after is not None
    assert held - before > 0.9 * BLOCK_BYTES
    assert held - after > 0.9 * BLOCK_BYTES


def test_devices_that_do_not_tell() -> None:
    reset_peak(torch.device("meta"))
    assert peak_bytes(torch.device("meta")) is None


@pytest.mark.gpu
def test_a_block_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    reset_peak(device)
    before = peak_bytes(device)
    block = torch.ones(BLOCK_BYTES // 4, device=device)
    del block
    assert (peak_bytes(device) or 0) - (before or 0) >= BLOCK_BYTES
