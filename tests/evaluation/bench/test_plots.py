"""Plots show the measured values, and every title states synthetic acceptance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_spec.evaluation.bench import plots

NAMES = ["speed_by_task", "speed_by_batch", "acceptance_by_position", "verify_cost"]


def row(contender: str, task: str, ratio: float, **more: Any) -> dict[str, Any]:
    values = {"ratio_p20": ratio - 0.1, "ratio": ratio, "ratio_p80": ratio + 0.1}
    return {"batch_size": 1, "contender": contender, "task": task, **values, **more}


SUMMARY = [
    row("plain", "code", 1.0),
    row("plain", "math", 1.0),
    row("plain", "all", 1.0),
    row("lookup", "code", 1.5),
    row("lookup", "math", 1.2),
    row("lookup", "all", 1.3, acceptance_by_position=[0.5, 0.25]),
    row("lookup", "all", 1.1, batch_size=8),
    row("lookup", "mixed", 1.1, batch_size=8),
]
STEP_COST = {"transformers": {"1": [0.010, 0.012], "16": [0.020]}, "auto": {"1": [0.008]}}
RESULTS = {"model": "org/model", "dtype": "float32", "summary": SUMMARY, "step_cost": STEP_COST}


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, ...]]:
    """Record the data of each plot by the plot's name."""
    found: dict[str, tuple[Any, ...]] = {}
    for name in ("lines", "ranges"):
        real = getattr(plots, name)

        def watch(data: Any, labels: Any, path: Path, *more: Any, real: Any = real) -> None:
            found[path.stem] = data, labels, *more
            real(data, labels, path, *more)

        monkeypatch.setattr(plots, name, watch)
    return found


@pytest.mark.full
def test_all_four(tmp_path: Path, drawn: dict[str, tuple[Any, ...]]) -> None:
    written = plots.draw(RESULTS, tmp_path / "plots")
    assert [path.stem for path in written] == list(drawn) == NAMES
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    by_task, _, title = drawn["speed_by_task"]
    assert list(by_task) == ["all", "code", "math"]
    assert by_task["code"]["lookup"] == (1.4, 1.5, 1.6)
    assert title == "model, float32, batch size 1"
    by_batch, *_ = drawn["speed_by_batch"]
    assert {name: list(panel) for name, panel in by_batch.items()} == {
        "batch size 1": ["plain", "lookup"],
        "batch size 8": ["lookup"],
    }
    assert drawn["acceptance_by_position"][0] == {"lookup": (range(1, 3), [0.5, 0.25])}
    cost, labels, _, spreads = drawn["verify_cost"]
    assert labels == ("nodes of one forward", "milliseconds")
    assert cost["transformers, DynamicCache"] == ([1, 16], [pytest.approx(11.0), 20.0])
    assert spreads["hf_spec"] == ([8.0], [8.0])


def test_what_was_not_measured_is_not_drawn(tmp_path: Path) -> None:
    assert [p.stem for p in plots.draw({"summary": SUMMARY[:3]}, tmp_path)] == ["speed_by_task"]


def test_every_title_says_that_acceptance_is_synthetic(
    tmp_path: Path, drawn: dict[str, tuple[Any, ...]]
) -> None:
    plots.draw({**RESULTS, "synthetic_acceptance": 0.7}, tmp_path)
    assert list(drawn) == NAMES
    assert all("SYNTHETIC acceptance 0.7" in found[2] for found in drawn.values())


def test_lines_with_spread_and_many_names(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    series = {f"way {index}": ([1, 2], [index, index + 0.5]) for index in range(12)}
    plots.lines(series, ("size", "speed"), plot, "a title", {"way 3": ([2.5, 3.0], [3.5, 4.0])})
    drawn = plot.read_text()
    assert all(f"<!-- {text} -->" in drawn for text in ("size", "speed", "a title", *series))
    # An axis of whole numbers has ticks only at whole numbers.
    assert "<!-- 1.25 -->" not in drawn


def test_ranges_name_every_panel_and_value(tmp_path: Path) -> None:
    plot = tmp_path / "plot.svg"
    panels = {
        "all": {"plain": (1.0, 1.0, 1.0), "lookup": (0.5, 1.5, 2.0)},
        "code": {"lookup": (1.0, 2.0, 3.0)},
    }
    plots.ranges(panels, "speed", plot, "a title")
    drawn = plot.read_text()
    for text in ("plain", "lookup", "all", "code", "speed", "a title"):
        assert f"<!-- {text} -->" in drawn
