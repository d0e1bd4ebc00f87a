"""Sweep of the graph settings: the counts, and resuming an interrupted command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.studies.gsd.sweep import Pair, Setting, main, settings, summary, sweep, table
from hf_spec.common.prompts import Prompt
from tests.tiny_models import draft_model

PLAIN = Setting(0.0, 0.0, None, 20)
MERGING = Setting(0.0, 0.0, 0, 20)


def test_settings_are_all_combinations() -> None:
    found = list(settings([(0.2, 0.3), (0.05, 0.1)], [None, 1], [15, 100]))
    assert len(found) == 8
    assert Setting(0.05, 0.1, None, 100) in found
    config = found[0].config
    assert (config.max_draft_tokens, config.length_policy) == (None, "static")
    assert (config.min_probability, config.min_sibling_ratio, config.max_nodes) == (0.2, 0.3, 15)
    (raised,) = settings([(0.2, 0.3)], [1], [15], 10_000)
    assert raised.config.children == 4
    chain, _ = settings([(0.2, 0.3)], [1], [15], children=[1, 2])
    assert chain.config.children == 1
    assert raised.config.max_draft_nodes == raised.config.expanded_per_level == 10_000


def test_counts(model: Any, prompts: list[Prompt], tokenizer: Any) -> None:
    pair = Pair(model, draft_model("llama"), tokenizer)
    known: list[dict[str, Any]] = []
    *_, records = sweep(pair, prompts, 8, [PLAIN, MERGING], known)
    assert [one["prompt"] for one in records] == [p.id for p in prompts for _ in range(2)]
    plain, merging = records[:2]
    assert plain["identical"]
    assert merging["identical"]
    assert plain["merges"] == 0 < merging["merges"]
    assert plain["sent"] <= 20 * plain["rounds"]
    # Recorded combinations are not run again.
    assert list(sweep(pair, prompts, 8, [PLAIN, MERGING], known)) == []


def test_summary_and_table() -> None:
    counts = dict.fromkeys(("merges", "draft_nodes", "sent", "draft_forwards"), 8)
    record = {
        "setting": vars(MERGING),
        "identical": True,
        "target_forwards": 5,
        "accepted": 6,
        "rounds": 4,
        "rounds_with_merged_accepted": 1,
        **counts,
    }
    other = {**record, "accepted": 2, "rounds_with_merged_accepted": 0, "identical": False}
    (row,) = summary([record, other])
    assert row["tau"] == pytest.approx(0.8)
    assert row["merged_accepted"] == pytest.approx(1 / 8)
    assert row["sent"] == 2.0
    assert table([row]).splitlines()[2] == (
        "| 0 / 0 | 0 | 20 | 256 | 4 | 0.80 | 2.0 | 2.0 | 2.0 | 12.5% | 1 of 2 |"
    )


def test_a_command_goes_on_where_it_was(folder: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "sweep.json"
    command = ["--model", str(folder), "--assistant", str(folder), "--per-task", "1"]
    command += ["--new-tokens", "3", "--thresholds", "0.2", "0.3", "--merge-length", "-1"]
    main([*command, "--max-nodes", "4", "--out", str(out)])
    assert capsys.readouterr().out.startswith("| thresholds | `merge_length` |")
    first = json.loads(out.read_text())
    assert len(first["records"]) == 6
    # The record is truncated, as after an interruption; the remaining part must not change.
    out.write_text(json.dumps({**first, "records": first["records"][:2]}))
    main([*command, "--max-nodes", "4", "--out", str(out)])
    assert json.loads(out.read_text())["records"] == first["records"]
    with pytest.raises(SystemExit, match="new_tokens"):
        main([*command, "--new-tokens", "4", "--max-nodes", "4", "--out", str(out)])
