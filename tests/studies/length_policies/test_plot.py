"""Plot of the simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.length_policies.plot import TITLES, draw, measured, series

RECORD = Path("examples/studies/length_policies/simulated.json")
MEASURED = Path("examples/studies/real_models/qwen_lengths_1_epyc.json")


def test_series_of_one_machine() -> None:
    cells = [
        {"node_cost": 0.02, "cold": False, "draft_cost": 0.1, "over_best_fixed": 1.05},
        {"node_cost": 0.08, "cold": False, "draft_cost": 0.1, "over_best_fixed": 1.5},
        {"node_cost": 0.02, "cold": True, "draft_cost": 0.1, "over_best_fixed": 1.5},
    ]
    costs, times = series(cells, 0.02)
    assert costs == [0.1]
    assert times == pytest.approx([5.0])


def test_a_measurement() -> None:
    rows = {
        # contender -> seconds, seconds of drafts, tau
        "none": (10.0, 0.0, 0.0),
        "draft@x": (7.6, 3.0, 1.5),
        "draft:max_draft_tokens=2@x": (8.0, 2.0 + 1.0, 1.0),
        "draft:max_draft_tokens=6@x": (9.0, 3.0 + 0.5, 3.0),
    }
    records = [
        {
            "prompt": "a",
            "contender": name,
            "seconds": [seconds, 20.0],
            "elapsed": [seconds, 20.0],
            "nodes": 1.0,
            "counters": {},
            "differences": [],
            "new_tokens": 10,
            "tau": tau,
            "draft_seconds": draft_seconds,
            "verify_seconds": 10.0,
        }
        for name, (seconds, draft_seconds, tau) in rows.items()
    ]
    cost, percent = measured({"records": records})
    # 0.6 s per round of two tokens, 1.4 s per round of six, steps of 1 s.
    assert cost == pytest.approx(0.2)
    assert percent == pytest.approx(-5.0)


def test_the_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = json.loads(RECORD.read_text("utf-8"))
    assert set(record["new"]) == set(record["old"]) == set(TITLES)
    sizes = []
    for measurements in ([], [json.loads(MEASURED.read_text("utf-8"))]):
        draw(record, measurements, tmp_path / "picture.svg")
        sizes.append(len((tmp_path / "picture.svg").read_text("utf-8")))
    assert sizes[1] > sizes[0] > 0
