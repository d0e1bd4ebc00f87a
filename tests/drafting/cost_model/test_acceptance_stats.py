"""Acceptance rates."""

from __future__ import annotations

import pytest

from hf_spec.drafting.cost_model.acceptance_stats import (
    LEVEL_PRIOR,
    DecayedRates,
    LevelRates,
)
from hf_spec.drafting.cost_model.draft_source import RETENTION


class TestRates:
    def test_from_the_expectation_to_the_trials(self) -> None:
        rates = DecayedRates(lambda kind: {"a": 0.2, "b": 0.9}[kind], 4.0)
        assert (rates.rate("a"), rates.rate("b")) == (0.2, 0.9)
        rates.count("a", True)
        assert rates.rate("a") == pytest.approx((0.95 * 4 * 0.2 + 1) / (0.95 * 4 + 1))
        for _ in range(300):
            rates.count("a", False)
        assert rates.rate("a") < 1e-6
        assert rates.rate("b") == 0.9

    def test_what_is_new_counts_more(self) -> None:
        early, late = DecayedRates(lambda _: 0.5, 4.0), DecayedRates(lambda _: 0.5, 4.0)
        for step in range(20):
            early.count(0, step < 10)
            late.count(0, step >= 10)
        assert early.rate(0) < 0.5 < late.rate(0)

    def test_after_fading_the_next_trials_count_more(self) -> None:
        rates, faded = DecayedRates(lambda _: 0.6, 3.0), DecayedRates(lambda _: 0.6, 3.0)
        for each in (rates, faded):
            for _ in range(40):
                each.count(1, False)
        low = rates.rate(1)
        for _ in range(500):
            faded.fade(RETENTION)
        assert low < 0.15
        assert faded.rate(1) == pytest.approx(low)
        for each in (rates, faded):
            each.count(1, True)
        # The weight has returned to that of the prior.
        assert faded.rate(1) == pytest.approx((3 * 0.95 * low + 1) / (3 * 0.95 + 1))
        assert rates.rate(1) < 0.2

    def test_a_level_without_trials_is_expected_to_do_as_well_as_the_one_above(self) -> None:
        rates = LevelRates(0.95)
        assert [rates.rate(depth) for depth in (None, 1, 5)] == [LEVEL_PRIOR] * 3
        for _ in range(20):
            rates.count(1, True)
        assert rates.rate(4) == rates.rate(1) > 0.85
        rates.count(2, False)
        assert rates.rate(4) == rates.rate(2) < rates.rate(1)
