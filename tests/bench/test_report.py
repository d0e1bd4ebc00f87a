"""Tables from records made by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_spec.bench.report import main, markdown, per_prompt, spread, summary
from hf_spec.bench.runner import Record, Row, StrategyStats


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
        assert row["outside_forward"] == pytest.approx(0.3)
        assert row["draft_share"] == pytest.approx(0.1)
        assert (row["drafted_tokens"], row["draft_nodes"], row["draft_forwards"]) == (12, 12, 5)
        assert row["rounds_with_merged_accepted"] == 0

    def test_counters_of_the_method(self) -> None:
        counters = {"rounds": 8, "rounds_with_merged_accepted": 2, "draft_nodes": 20}
        row = summary([record("p", "a", 0, 4.0, stats=statistics(1.0, 3.0, **counters))])[-1]
        assert (row["draft_nodes"], row["rounds_with_merged_accepted"]) == (20, 0.25)

    def test_acceptance_by_position(self) -> None:
        first = StrategyStats(1.0, 9, 0, 0.0, 1.0, 0.0, (4, 1), {}, (5, 5))
        second = StrategyStats(1.0, 9, 0, 0.0, 1.0, 0.0, (2,), {}, (5, 3, 2))
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
        # 24 tokens of three rows in eight forwards.
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
        # Of p twice and once as fast, of q half as fast.
        assert found["a"]["ratio_to_none"] == pytest.approx(1.0)
        text = markdown(results([*none, *ours]))
        assert "| ratio to plain, median (p20 - p80) | ratio to none |" in text
        assert summary(ours)[0]["ratio_to_none"] is None


def results(records: Sequence[Record], **facts: Any) -> dict[str, Any]:
    return {"summary": summary(records), **facts}


def test_markdown() -> None:
    plain = [
        record(r.prompt, "plain", r.repeat, 12.0, task=r.task, target_forwards=None)
        for r in five_prompts()
    ]
    ours = [record(r.prompt, "ours", r.repeat, r.seconds, task=r.task) for r in five_prompts()]
    head, overall, tasks = (
        part.splitlines() for part in markdown(results([*plain, *ours])).split("\n\n")
    )
    assert head == ["### batch size 1"]
    assert {line.count("|") for line in overall} == {10}
    assert {line.count("|") for line in tasks} == {4}
    assert overall[2] == (
        "| plain | 1.00 (1.00 - 1.00) | - | 1.00 | 2.0 (2.0 - 2.0) | - | - | - | 5 of 5 |"
    )
    assert overall[3].startswith("| ours | 3.00 (1.80 - 4.20) | ")
    assert overall[3].endswith(" | 3.00 | - | 5 of 5 |")
    assert tasks[0] == "| ratio (identical outputs) by task | x | y |"
    assert tasks[2:] == [
        "| plain | 1.00 (3 of 3) | 1.00 (2 of 2) |",
        "| ours | 2.00 (3 of 3) | 4.50 (2 of 2) |",
    ]


def test_markdown_of_what_was_drafted() -> None:
    counters = {"rounds": 8, "rounds_with_merged_accepted": 2, "draft_nodes": 20}
    stats = StrategyStats(1.0, 12, 5, 0.5, 3.0, 0.5, (3, 1), counters, (8, 4))
    ours = record("p", "gsd", 0, 4.0, stats=stats, peak_bytes=3 << 20)
    text = markdown(results([record("p", "plain", 0, 12.0), ours]))
    _, overall, _, drafts = text.split("\n\n")
    assert overall.splitlines()[3].endswith(" | 1.00 | 3.00 | 3 | 1 of 1 |")
    assert len(drafts.splitlines()) == 3
    assert drafts.splitlines()[2] == (
        "| gsd | 0.38 0.25 | 12.0 | 20.0 | 5.0 | 25.0% | 12 / 75 / 12 % |"
    )


def test_markdown_by_batch_size_with_parts_of_a_step() -> None:
    batch = {"batch_size": 2, "rows": (Row("p", "x", True), Row("q", "y", False)), "task": "mixed"}
    records = [record("p", "a", 0, 1.0), record("p+q", "a", 0, 1.0, **batch)]
    seconds = {"verify: forward": 3.0, "commit": 0.5, "rest": 0.5}
    profiles = [{"batch_size": 2, "contender": "a", "seconds": seconds}]
    single, double = markdown(results(records, profiles=profiles)).split("### batch size 2")
    assert "share of the time" not in single
    assert (
        "| ratio (identical outputs) by task | x | y |\n|---|---|---|\n| a | (1 of 1) | (0 of 1) |"
        in double
    )
    assert "| share of the time, % | verify: forward | commit | rest |" in double
    assert "| a | 75.0 | 12.5 | 12.5 |" in double


def test_sampled_outputs_have_no_counts() -> None:
    text = markdown(results([record("p", "a", 0, 1.0, identical=None)]))
    assert "| a | 12.00 |" in text
    assert "of 1" not in text


def test_synthetic_acceptance_is_said_first() -> None:
    text = markdown(results([record("p", "a", 0, 1.0)], synthetic_acceptance=0.7))
    assert text.startswith("**SYNTHETIC acceptance 0.7**")


def test_the_command_prints_a_file_and_draws_it(tmp_path: Path, capsys: Any) -> None:
    file, folder = tmp_path / "results.json", tmp_path / "plots"
    content = results([record("p", "a", 0, 1.0)], model="some/model", dtype="float32")
    file.write_text(json.dumps(content))
    main([str(file), "--plots", str(folder)])
    assert capsys.readouterr().out.strip() == markdown(content)
    assert [path.name for path in folder.iterdir()] == ["speed_by_task.png"]
