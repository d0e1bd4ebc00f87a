"""Settings of calibrations: what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.evaluation.bench.settings import CalibrationSettings, TreeSettings


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (CalibrationSettings, {"thresholds": ()}),
        (CalibrationSettings, {"thresholds": (0.5, 1.5)}),
        (CalibrationSettings, {"longest": ()}),
        (CalibrationSettings, {"static_lengths": ()}),
        (CalibrationSettings, {"repeats": 0}),
        (CalibrationSettings, {"new_tokens": 0}),
        (CalibrationSettings, {"reference": 0}),
        (TreeSettings, {"depth": 0}),
        (TreeSettings, {"num_ranks": 0}),
        (TreeSettings, {"max_nodes": 0}),
        (TreeSettings, {"new_tokens": 1}),
        (TreeSettings, {"repeats": 0}),
        (TreeSettings, {"generations": 0}),
        (TreeSettings, {"drafted_nodes": (0,)}),
        (TreeSettings, {"node_counts": (0, 3)}),
    ],
)
def test_wrong_values(settings: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        settings(**options)


def test_ways_are_counted() -> None:
    assert CalibrationSettings((0.1, 0.2), (3, 4, 5), (1,)).num_contenders == 1 + 2 * 3 + 1
