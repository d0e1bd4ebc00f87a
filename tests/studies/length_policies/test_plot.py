"""Plot of the simulation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.studies.length_policies.plot import TITLES, draw, series

RECORD = Path("examples/studies/length_policies/simulated.json")


def test_series_of_one_machine() -> None:
    cells = [
        {"node_cost": 0.02, "cold": False, "draft_cost": 0.1, "over_best_fixed": 1.05},
        {"node_cost": 0.08, "cold": False, "draft_cost": 0.1, "over_best_fixed": 1.5},
        {"node_cost": 0.02, "cold": True, "draft_cost": 0.1, "over_best_fixed": 1.5},
    ]
    costs, times = series(cells, 0.02)
    assert costs == [0.1]
    assert times == pytest.approx([5.0])


def test_the_record_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    record = json.loads(RECORD.read_text("utf-8"))
    assert set(record["new"]) == set(record["old"]) == set(TITLES)
    draw(record, tmp_path / "picture.svg")
    assert "<svg" in (tmp_path / "picture.svg").read_text("utf-8")
