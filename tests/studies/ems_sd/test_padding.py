"""Padding model of Appendix B: closed sums against a simulation and the paper's figures."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from examples.studies.ems_sd.padding import accuracy_for, expected_gain, padding_ratio


def simulated_gain(rng: random.Random, accuracy: float, cap: int) -> int:
    gain = 1
    while gain < cap and rng.random() < accuracy:
        gain += 1
    return gain


@pytest.mark.parametrize(("accuracy", "size"), [(0.3, 1), (0.5, 4), (0.8, 8), (0.9, 16)])
def test_the_sums_are_what_a_simulation_finds(accuracy: float, size: int) -> None:
    rng = random.Random(0)
    best, mean = [], []
    for _ in range(4000):
        gains = [simulated_gain(rng, accuracy, 8) for _ in range(size)]
        best.append(max(gains))
        mean.append(fmean(gains))
    assert expected_gain(accuracy, size, 8) == pytest.approx(fmean(best), abs=0.1)
    assert expected_gain(accuracy, 1, 8) == pytest.approx(fmean(mean), abs=0.1)
    ratio = (fmean(best) - fmean(mean)) / fmean(mean)
    assert padding_ratio(accuracy, size, 8) == pytest.approx(ratio, abs=0.05)


def test_the_figures_of_the_paper() -> None:
    """The ratio exceeds 50% up to accuracy 0.8 in batches above 8, and 30% at accuracy 0.9."""
    assert expected_gain(0.8, 8, 8) == pytest.approx(7.7, abs=0.05)
    assert padding_ratio(0.8, 8, 8) == pytest.approx(0.86, abs=0.01)
    for accuracy in (0.3, 0.5, 0.7, 0.8):
        assert padding_ratio(accuracy, 9, 8) > 0.5
    assert padding_ratio(0.9, 8, 8) > 0.3


def test_one_row_needs_no_padding() -> None:
    assert padding_ratio(0.7, 1, 8) == 0


@pytest.mark.parametrize("accuracy", [0.0, 0.25, 0.6, 0.95, 1.0])
def test_the_accuracy_is_found_from_the_gain(accuracy: float) -> None:
    gain = expected_gain(accuracy, 1, 5)
    assert accuracy_for(gain, 5) == pytest.approx(accuracy, abs=1e-9)
