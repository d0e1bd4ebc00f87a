"""Markdown reports of handmade records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_spec.evaluation.bench.report import main, markdown
from hf_spec.evaluation.bench.runner import Record, Row
from hf_spec.evaluation.bench.summary import summary
from tests.evaluation.bench.test_summary import five_prompts, record, statistics


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
    stats = statistics(1.0, 3.0, **counters)
    ours = record("p", "gsd", 0, 4.0, stats=stats, peak_bytes=3 << 20)
    text = markdown(results([record("p", "plain", 0, 12.0), ours]))
    _, overall, _, drafts = text.split("\n\n")
    assert overall.splitlines()[3].endswith(" | 1.00 | 3.00 | 3 | 1 of 1 |")
    assert len(drafts.splitlines()) == 3
    assert drafts.splitlines()[2] == (
        "| gsd | 0.38 0.25 | 0.33 | 12.0 | 20.0 | 5.0 | 25.0% | 12 / 75 / 12 % |"
    )


def test_ratio_to_the_engine_without_drafts() -> None:
    both = [record("p", "none", 0, 6.0), record("p", "a", 0, 3.0)]
    text = markdown(results(both))
    assert "| ratio to plain, median (p20 - p80) | ratio to none |" in text
    assert "| a | 4.00 (4.00 - 4.00) | 2.00 |" in text


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
