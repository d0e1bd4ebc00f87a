"""Benchmark summaries of handmade records."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.evaluation.bench.runner import Record, Row
from hf_spec.evaluation.bench.summary import per_prompt, spread, summary


def record(prompt: str, contender: str, repeat: int, seconds: float, **more: Any) -> Record:
    fields: dict[str, Any] = {
        "task": "x",
        "plain_seconds": 12.0,
        "new_tokens": 24,
        "target_forwards": 8,
        "identical": True,
        **more,
    }
    fields.setdefault("rows", (Row(prompt, fields["task"], fields["identical"]),))
    return Record(prompt=prompt, contender=contender, repeat=repeat, seconds=seconds, **fields)


def statistics(tau: float, verify_seconds: float, **counters: int) -> SpecStats:
    row = RowStats(4, 12, int(4 * tau), 12, [8, 4], [3, 1])
    times = {"draft_seconds": 0.5, "verify_seconds": verify_seconds, "other_seconds": 0.5}
    return SpecStats([row], draft_forwards=5, counters=counters, **times)


def five_prompts() -> list[Record]:
    """Return records with ratios 1 to 5, and two outlying repetitions of each."""
    records = []
    for ratio in range(1, 6):
        task = "x" if ratio < 4 else "y"
        for repeat, seconds in enumerate((12 / ratio, 0.01, 1000.0)):
            records.append(record(f"p{ratio}", "ours", repeat, seconds, task=task))
    return records


def test_per_prompt_is_the_median_over_repetitions() -> None:
    assert per_prompt(five_prompts()) == pytest.approx({f"p{n}": n for n in range(1, 6)})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([3.0], (3.0, 3.0, 3.0)),
        ([1.0, 2.0], (1.2, 1.5, 1.8)),
        ([5.0, 1.0, 4.0, 2.0, 3.0], (1.8, 3.0, 4.2)),
        ([2.0] * 7, (2.0, 2.0, 2.0)),
    ],
)
def test_spread(values: list[float], expected: tuple[float, float, float]) -> None:
    assert spread(values) == pytest.approx(expected)


class TestSummary:
    def test_medians_and_spread_of_prompts(self) -> None:
        rows = {row["task"]: row for row in summary(five_prompts())}
        assert rows.keys() == {"x", "y", "all"}
        assert [rows["all"][key] for key in ("ratio_p20", "ratio", "ratio_p80")] == pytest.approx(
            [1.8, 3.0, 4.2]
        )
        assert rows["x"]["ratio"] == pytest.approx(2.0)
        assert rows["y"]["ratio"] == pytest.approx(4.5)
        assert [rows[task]["batches"] for task in ("x", "y", "all")] == [3, 2, 5]
        assert rows["all"]["tokens_per_second"] == pytest.approx(6.0)
        assert rows["all"]["tokens_per_second_p80"] == pytest.approx(8.4)

    def test_totals(self) -> None:
        records = [
            record("p", "ours", 0, 4.0),
            record("q", "ours", 0, 8.0, new_tokens=16, target_forwards=2, identical=False),
        ]
        row = summary(records)[-1]
        assert row["total_ratio"] == 2.0
        assert row["tokens_per_second"] == 4.0
        assert row["outputs"] == 2
        assert row["peak_bytes"] is None
        assert row["tokens_per_forward"] == 4.0
        assert row["identical"] == 1
        assert "tau" not in row

    def test_forwards_that_cannot_be_counted(self) -> None:
        records = [record("p", "a", 0, 1.0), record("q", "a", 0, 1.0, target_forwards=None)]
        assert summary(records)[-1]["tokens_per_forward"] is None

    def test_statistics_of_ours(self) -> None:
        records = [
            record("p", "a", 0, 4.0, stats=statistics(1.0, 3.0)),
            record("q", "a", 0, 6.0, stats=statistics(2.0, 4.0)),
        ]
        row = summary(records)[-1]
        assert row["tau"] == 1.5
        # 4 and 8 of 12 drafted tokens each are accepted.
        assert row["alpha"] == 0.5
        assert row["outside_forward"] == pytest.approx(0.3)
        assert row["draft_share"] == pytest.approx(0.1)
        assert (row["drafted_tokens"], row["draft_nodes"], row["draft_forwards"]) == (12, 12, 5)
        assert row["rounds_with_merged_accepted"] == 0

    def test_counters_of_the_method(self) -> None:
        counters = {"rounds": 8, "rounds_with_merged_accepted": 2, "draft_nodes": 20}
        row = summary([record("p", "a", 0, 4.0, stats=statistics(1.0, 3.0, **counters))])[-1]
        assert (row["draft_nodes"], row["rounds_with_merged_accepted"]) == (20, 0.25)

    def test_acceptance_by_position(self) -> None:
        first = SpecStats([RowStats(5, 9, 5, 9, [5, 5], [4, 1])])
        second = SpecStats([RowStats(5, 9, 2, 9, [5, 3, 2], [2])])
        records = [record("p", "a", 0, 4.0, stats=first), record("q", "a", 0, 4.0, stats=second)]
        assert summary(records)[-1]["acceptance_by_position"] == [0.6, 0.125]

    def test_an_output_is_identical_if_it_always_is(self) -> None:
        records = [record("p", "a", repeat, 1.0, identical=repeat != 1) for repeat in range(3)]
        row = summary([*records, record("q", "a", 0, 1.0)])[-1]
        assert (row["identical"], row["outputs"]) == (1, 2)
        assert row["identical_by_task"] == {"x": (1, 2)}

    def test_sampled_outputs_are_not_counted(self) -> None:
        row = summary([record("p", "a", 0, 1.0, identical=None)])[-1]
        assert (row["identical"], row["identical_by_task"]) == (None, None)

    def test_rows_of_batches_count_for_their_own_task(self) -> None:
        rows = (Row("p", "x", True), Row("q", "y", False), Row("r", "y", True))
        more = {"batch_size": 3, "task": "mixed", "identical": False, "rows": rows}
        found = summary(
            [
                record("p+q+r", "a", 0, 2.0, peak_bytes=5, **more),
                record("p+q+r", "a", 1, 2.0, peak_bytes=7, **more),
                record("p", "a", 0, 4.0),
            ]
        )
        by_key = {(row["batch_size"], row["task"]): row for row in found}
        assert by_key.keys() == {(3, "mixed"), (3, "all"), (1, "x"), (1, "all")}
        row = by_key[3, "all"]
        assert row["identical_by_task"] == {"x": (1, 1), "y": (1, 2)}
        assert (row["batches"], row["outputs"], row["identical"]) == (1, 3, 2)
        # 24 tokens of three rows in eight forward passes.
        assert row["tokens_per_forward"] == 1.0
        assert row["peak_bytes"] == 7

    def test_ratio_to_the_engine_without_drafts_of_the_same_repetition(self) -> None:
        none = [
            record("p", "none", 0, 6.0),
            record("p", "none", 1, 4.0),
            record("q", "none", 0, 3.0),
        ]
        ours = [record("p", "a", 0, 3.0), record("p", "a", 1, 4.0), record("q", "a", 0, 6.0)]
        found = {row["contender"]: row for row in summary([*none, *ours]) if row["task"] == "all"}
        assert found["none"]["ratio_to_none"] == 1.0
        # Prompt p: 2x and 1x as fast as `none`; prompt q: half as fast.
        assert found["a"]["ratio_to_none"] == pytest.approx(1.0)
        assert summary(ours)[0]["ratio_to_none"] is None
