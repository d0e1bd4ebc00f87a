"""Every row of the statistics has one line in the legend."""

from __future__ import annotations

import pytest

from hf_spec.cli.answer.legend import LEGEND, legend
from hf_spec.common.outputs import RowStats, SpecStats
from hf_spec.methods.sdsat import drafter as sdsat

COUNTERS = (
    *sdsat.COUNTERS,
    *("rounds", "idle_rounds", "asked_falcon@head", "draft_nodes", "merges"),
    "rounds_with_merged_accepted",
)


@pytest.fixture
def stats() -> SpecStats:
    row = RowStats(4, 10, 6, 10, [4, 3, 2, 1, 1], [4, 1, 1])
    times = {"draft_seconds": 1.0, "verify_seconds": 2.0, "other_seconds": 0.5}
    counts = {"target_padding": 1, "target_tokens": 3, "graph_replays": 2, "draft_forwards": 5}
    counts["memory_retries"] = 1
    counters = dict.fromkeys(COUNTERS, 7)
    return SpecStats([row, row], **counts, **times, counters=counters)  # type: ignore[arg-type]


def test_every_row_is_explained_in_one_line_of_80_columns(stats: SpecStats) -> None:
    rows, lines = str(stats).splitlines(), legend(stats).splitlines()
    assert len(rows) == len(LEGEND) == len(lines)
    for row, line in zip(rows, lines, strict=True):
        label, _, meaning = line.partition(": ")
        assert row.startswith(f"{label} ")
        assert meaning in LEGEND.values()
        assert max(len(row), len(line)) <= 80
    # Each meaning belongs to one row.
    assert len({line.partition(": ")[2] for line in lines}) == len(lines)


def test_rows_that_are_missing_have_no_line() -> None:
    few = legend(SpecStats([RowStats(1, 0, 0, 1)])).splitlines()
    labels = [line.partition(":")[0] for line in few]
    assert labels == ["new tokens", "target forwards", "draft tokens", "seconds", "tokens/s"]


def test_an_unknown_counter_has_no_line() -> None:
    """A registered drafter may have counters that the legend does not explain."""
    counted = SpecStats([RowStats(1, 0, 0, 1)], counters={"cache_hits": 3})
    assert "cache hits" in str(counted)
    assert legend(counted) == legend(SpecStats([RowStats(1, 0, 0, 1)]))
