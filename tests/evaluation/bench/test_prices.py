"""Forwards at one price."""

from __future__ import annotations

import pytest

from hf_spec.evaluation.bench.prices import Spent, at_one_price


def test_forwards_count_and_not_the_seconds_of_one_generation() -> None:
    generations = [
        Spent("static", 10, 1.0, 20, 0.2),
        # The same forwards in a slow moment.
        Spent("static", 10, 3.0, 20, 0.9),
        Spent("static", 5, 0.5, 40, 0.4),
        Spent("disco", 8, 0.8, 10, 0.3),
        Spent("none", 12, 1.2, 0, 0.0),
    ]
    costs = at_one_price(generations)
    # Verifying costs 0.1 each, a level 0.01, and 0.03 with a classifier.
    assert costs == pytest.approx([1.2, 1.2, 0.9, 1.1, 1.2])
