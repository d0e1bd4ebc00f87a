"""Plots: what is drawn is what was recorded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hf_spec.bench.plots import lines, main, ranges, training_curves

RECORDS = {
    "about": "two trainings",
    "k = 1": {
        "evaluations": [
            {"step": 1, "answer_tokens": 500_000, "tau": 0.4},
            {"step": 2, "answer_tokens": 1_000_000, "tau": 0.5, "slot_2": 0.2},
        ]
    },
    "k = 2": {"minutes": 3, "evaluations": [{"step": 1, "answer_tokens": 250_000, "tau": 0.3}]},
}


def test_curves_are_the_evaluations() -> None:
    assert training_curves(RECORDS, "tau") == {
        "k = 1": ([0.5, 1.0], [0.4, 0.5]),
        "k = 2": ([0.25], [0.3]),
    }
    assert training_curves(RECORDS, "slot_2") == {"k = 1": ([1.0], [0.2])}


def test_the_command_draws_a_line_per_training(tmp_path: Path) -> None:
    records, plot = tmp_path / "records.json", tmp_path / "plot.svg"
    records.write_text(json.dumps(RECORDS))
    main([str(records), "--out", str(plot), "--title", "tau of one pass"])
    drawn = plot.read_text()
    for text in ("k = 1", "k = 2", "tau of one pass", "answer tokens seen, millions"):
        assert f"<!-- {text} -->" in drawn


def test_lines_with_spread_and_many_names(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    series = {f"way {index}": ([1, 2], [index, index + 0.5]) for index in range(12)}
    lines(series, ("size", "speed"), plot, "a title", {"way 3": ([2.5, 3.0], [3.5, 4.0])})
    drawn = plot.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("size", "speed", "a title", *series))
    # Whole numbers are marked as such.
    assert "<!-- 1.25 -->" not in drawn


def test_ranges_name_every_panel_and_value(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    panels = {
        "all": {"plain": (1.0, 1.0, 1.0), "lookup": (0.5, 1.5, 2.0)},
        "code": {"lookup": (1.0, 2.0, 3.0)},
    }
    ranges(panels, "speed", plot, "a title")
    drawn = plot.read_text()
    for text in ("plain", "lookup", "all", "code", "speed", "a title"):
        assert f"<!-- {text} -->" in drawn


def test_records_without_a_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = tmp_path / "records.json"
    records.write_text(json.dumps({"about": "nothing"}))
    with pytest.raises(SystemExit):
        main([str(records), "--out", str(tmp_path / "plot.svg")])
    assert "has no training with 'tau'" in capsys.readouterr().err
