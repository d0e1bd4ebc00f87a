"""Tables from records made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec.bench.report import markdown, per_prompt, spread, summary
from hf_spec.bench.runner import Record, StrategyStats


def record(prompt: str, contender: str, repeat: int, seconds: float, **more: Any) -> Record:
    fields = {
        "task": "x",
        "plain_seconds": 12.0,
        "new_tokens": 24,
        "target_forwards": 8,
        "identical": True,
        **more,
    }
    return Record(prompt=prompt, contender=contender, repeat=repeat, seconds=seconds, **fields)


def statistics(tau: float, verify_seconds: float, **counters: int) -> StrategyStats:
    return StrategyStats(tau, 12, 5, 0.5, verify_seconds, 0.5, (3, 1), counters)


def five_prompts() -> list[Record]:
    """Ratios 1 to 5 in the middle repetition, one far off in each of the others."""
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
        assert [rows[task]["prompts"] for task in ("x", "y", "all")] == [3, 2, 5]

    def test_totals(self) -> None:
        records = [
            record("p", "ours", 0, 4.0),
            record("q", "ours", 0, 8.0, new_tokens=16, target_forwards=2, identical=False),
        ]
        row = summary(records)[-1]
        assert row["total_ratio"] == 2.0
        assert row["tokens_per_second"] == 4.0
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
        assert row["outside_forward"] == pytest.approx(0.3)
        assert row["draft_share"] == pytest.approx(0.1)
        assert (row["drafted_tokens"], row["draft_nodes"], row["draft_forwards"]) == (12, 12, 5)
        assert row["rounds_with_merged_accepted"] == 0

    def test_counters_of_the_method(self) -> None:
        counters = {"rounds": 8, "rounds_with_merged_accepted": 2, "draft_nodes": 20}
        row = summary([record("p", "a", 0, 4.0, stats=statistics(1.0, 3.0, **counters))])[-1]
        assert (row["draft_nodes"], row["rounds_with_merged_accepted"]) == (20, 0.25)


def test_markdown() -> None:
    plain = [
        record(r.prompt, "plain", r.repeat, 12.0, task=r.task, target_forwards=None)
        for r in five_prompts()
    ]
    lines = markdown([*plain, *five_prompts()]).splitlines()
    overall, tasks = lines[:4], lines[5:]
    assert lines[4] == ""
    assert {line.count("|") for line in overall} == {7}
    assert {line.count("|") for line in tasks} == {4}
    assert overall[2] == "| plain | 1.00 (1.00 - 1.00) | 1.00 | 2.0 | - | 5 of 5 |"
    assert overall[3].startswith("| ours | 3.00 (1.80 - 4.20) | ")
    assert overall[3].endswith(" | 3.00 | 5 of 5 |")
    assert tasks[0] == "| ratio by task, median | x | y |"
    assert tasks[2:] == ["| plain | 1.00 | 1.00 |", "| ours | 2.00 | 4.50 |"]


def test_markdown_of_what_was_drafted() -> None:
    counters = {"rounds": 8, "rounds_with_merged_accepted": 2, "draft_nodes": 20}
    ours = record("p", "gsd", 0, 4.0, stats=statistics(1.0, 3.0, **counters))
    table = markdown([record("p", "plain", 0, 12.0), ours]).split("\n\n")[-1].splitlines()
    assert len(table) == 3
    assert table[2] == "| gsd | 1.00 | 12.0 | 20.0 | 5.0 | 25.0% | 12 / 75 / 12 % |"
