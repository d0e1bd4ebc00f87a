"""Cost curves from configured points and from measured rounds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from hf_spec.common.errors import OptionError
from hf_spec.drafting.cost_model.acceptance_stats import LEVEL_PRIOR
from hf_spec.drafting.cost_model.cost_curves import (
    FORWARD_COST,
    FRESH,
    LIFETIME,
    NODE_COST,
    READ_COST,
    SMALLEST_LIFETIME,
    Costs,
    Curve,
    LearnedCurve,
    RoundTimes,
    cached_times,
    check_timings,
)
from hf_spec.engine.fast.compiled_layers import compiling
from tests.tiny_models import build


class TestCurve:
    def test_straight_between_points_and_on_behind_the_last(self) -> None:
        curve = Curve([[8, 3.0], [0, 1.0], [4, 2.0], [16, 4.0]])
        assert [curve(size) for size in (0, 2, 4, 6, 8, 12, 24)] == [1, 1.5, 2, 2.5, 3, 3.5, 5]
        assert curve(-3) == 1

    def test_the_fastest_run_counts_and_nothing_costs_more_than_a_larger_size(self) -> None:
        curve = Curve([(1, 9.0), (1, 2.0), (4, 7.0), (16, 3.0), (32, 5.0)])
        assert [curve(size) for size in (1, 4, 16, 32)] == [2, 3, 3, 5]

    def test_one_point(self) -> None:
        assert Curve([(4, 2.0)])(1) == Curve([(4, 2.0)])(400) == 2.0


def curve(*times: tuple[float, float]) -> LearnedCurve:
    found = LearnedCurve(lambda size: 1.0 + size, scales=True)
    for size, seconds in times:
        found.learn(size, seconds)
    return found


class TestLearnedCurve:
    def test_expected_as_long_as_nothing_has_timings(self) -> None:
        assert curve()(3) == 4.0
        assert not curve().has_timings

    def test_one_time_sets_the_scale(self) -> None:
        known = curve((3, 0.4))
        assert known.has_timings
        assert [known(size) for size in (1, 3, 9)] == pytest.approx([0.2, 0.4, 1.0])

    def test_straight_between_known_sizes_and_in_proportion_beyond(self) -> None:
        known = curve((1, 2.0), (4, 2.9))
        assert [known(size) for size in (1, 2, 3, 4)] == pytest.approx([2.0, 2.3, 2.6, 2.9])
        assert known(9) == pytest.approx(5.8)
        assert known(0) == pytest.approx(1.0)

    def test_a_size_costs_no_more_than_a_larger_one(self) -> None:
        known = curve((2, 3.0), (4, 2.0), (8, 5.0))
        assert [known(size) for size in (2, 3, 4, 8)] == [2.0, 2.0, 2.0, 5.0]

    def test_a_curve_starts_from_another_one(self) -> None:
        similar = curve((1, 2.0), (4, 2.9))
        new = LearnedCurve(similar)
        assert (new(2), new.is_known, new.has_timings) == (similar(2), True, False)
        # Its own timings count from then on, those of the other curve as proportions.
        new.learn(4, 5.8)
        assert [new(size) for size in (1, 4, 8)] == pytest.approx([4.0, 5.8, 2 * similar(8)])
        assert not LearnedCurve(curve()).is_known

    def test_proportions_of_free_sizes(self) -> None:
        new = LearnedCurve(LearnedCurve(lambda _: 0.0))
        new.learn(4, 2.0)
        assert new(8) == 4.0

    def test_a_new_size_counts_as_much_more_expensive_after_two_timings(self) -> None:
        known = curve((1, 2.0), (4, 9.0))
        assert known(4) == 5.0
        known.learn(4, 8.0)
        assert known(4) == 8.0
        assert curve((1, 2.0), (4, 3.0))(4) == 3.0
        assert curve((1, 2.0), (4, 7.0))(4) == 7.0

    def test_sizes_between_count_for_the_next_larger_one_in_proportion(self) -> None:
        assert curve((9, 10.0))(8) == pytest.approx(9.0)
        # The first node of a tile is expensive, but the step without it stays cheap.
        for rows in (1, 4, 7, 8, 16, 64):
            assert curve((rows, 1.0), *[(rows + 1, 3.0)] * 9)(rows) == 1.0

    def test_costs_follow_new_times(self) -> None:
        known = curve(*[(1, 1.0)] * 5, *[(1, 1.4)] * 60)
        assert known(1) == pytest.approx(1.4, rel=0.01)

    def test_a_hiccup_counts_for_little(self) -> None:
        known = curve(*[(1, 1.0)] * 20, (1, 500.0))
        assert known(1) == 1.0
        # This holds for a new size too; otherwise it would never be tried again.
        assert curve((1, 1.0), (8, 500.0))(8) == 4.5

    def test_the_median_of_the_first_times_counts(self) -> None:
        """This includes the very first timing, which has no bound."""
        for first in itertools.permutations((1.0, 1.1, 30.0)):
            assert curve(*[(1, seconds) for seconds in first])(1) == 1.1
            assert curve(*[(1, seconds) for seconds in first[:2]])(1) == min(first[:2])
        assert curve((4, 90.0), (1, 1.0), (4, 2.0))(4) == 2.0

    def test_what_was_not_timed_lately_is_stale(self) -> None:
        known = curve((1, 1.0), *[(8, 2.0)] * (FRESH - 1))
        assert not known.is_stale(1)
        assert not known.is_stale(4)
        known.learn(8, 2.0)
        assert known.is_stale(1)
        assert not known.is_stale(8)

    def test_what_was_learned_long_ago_is_forgotten(self) -> None:
        known = curve((8, 9.0), *[(1, 1.0)] * (LIFETIME - 1))
        assert known(8) == pytest.approx(9.0)
        known.learn(1, 1.0)
        assert known(8) == pytest.approx(4.5)

    def test_after_every_loss_timings_are_remembered_for_twice_as_long(self) -> None:
        known, waits = curve(), []
        for _ in range(4):
            known.learn(8, 9.0)
            known.learn(8, 9.0)
            wait = 0
            while known(8) == pytest.approx(9.0):
                known.learn(1, 1.0)
                wait += 1
            waits.append(wait)
        assert waits == [LIFETIME * 2**n for n in range(4)]

    def test_the_smallest_size_is_remembered_longer(self) -> None:
        known = curve((1, 1.0), (8, 2.0), *[(16, 3.0)] * (LIFETIME - 1))
        assert known(8) == pytest.approx(2.0)
        known.learn(16, 3.0)
        assert known(8) == pytest.approx(1 + 2 * 7 / 15)
        for _ in range(SMALLEST_LIFETIME - LIFETIME):
            known.learn(16, 3.0)
        assert known(1) == pytest.approx(3.0 * 2 / 17)

    def test_timings_of_one_size_show_how_slow_the_machine_is(self) -> None:
        """Otherwise steps without a draft would keep a high cost after the machine gets faster."""
        known = curve(*[(16, 1.0)] * 3, *[(20, 1.2)] * 3)
        for _ in range(5):
            known.learn(20, 0.9)
        assert known(20) == pytest.approx(0.9)
        assert known(16) == pytest.approx(0.75)
        # Outliers are ignored, even repeated ones.
        for _ in range(9):
            known.learn(20, 9.0)
        assert known(16) == pytest.approx(0.75)
        # Timings of a new size or of a size between knots are ignored too.
        for size in (40, 40, 40, 17, 17, 17):
            known.learn(size, 9.0)
        assert known(16) == pytest.approx(0.75)

    def test_nodes_beyond_the_largest_size_cost_as_much_as_those_before(self) -> None:
        """The expected cost alone would grow by only 13% from 24 to 40 nodes."""
        known = LearnedCurve(lambda size: 1.0 + 0.01 * size)
        for size, seconds in ((16, 1.6), (24, 2.4)):
            known.learn(size, seconds)
        assert known(40) == pytest.approx(4.0)
        known.learn(24, 1.6)
        assert known(40) == pytest.approx(1.6 * 1.40 / 1.24)
        # The second node of a round costs the most; the slope there does not hold for more nodes.
        known = LearnedCurve(lambda size: 1.0 + 0.01 * size)
        for size, seconds in ((1, 1.0), (4, 1.3)):
            known.learn(size, seconds)
        assert known(8) == pytest.approx(1.3 * 1.08 / 1.04)

    def test_sizes_grow_by_steps(self) -> None:
        assert curve().largest_trial == math.inf
        assert curve((1, 1.0)).largest_trial == 8
        assert curve((64, 1.0)).largest_trial == 96
        # A single timing far above the expectation is not trusted, and larger sizes are not tried.
        assert curve((64, 1.0), (96, 3.0)).largest_trial == 96
        assert curve((64, 1.0), (96, 3.0), (96, 3.0)).largest_trial == 144

    def test_a_size_between_counts_by_the_costs_around_it(self) -> None:
        known = curve((64, 64.0), (80, 80.0), (66, 66.0))
        assert known(64) == pytest.approx(64.0)

    def test_generations_in_other_threads_may_learn_while_one_reads(self) -> None:
        shared = curve((1, 1.0), (8, 2.0), (8, 2.0))

        class Size(float):
            """Size whose comparisons make another generation learn and forget timings."""

            def __gt__(self, other: object) -> bool:
                for _ in range(LIFETIME):
                    shared.learn(64, 9.0)
                return float(self) > other  # type: ignore[operator]

            def __ge__(self, other: object) -> bool:
                shared.learn(3, 1.0)
                return float(self) >= other  # type: ignore[operator]

        assert shared.is_reliable(Size(9))
        assert 1.0 < shared(Size(5)) < 2.0


def levels(depth: int) -> int:
    return depth


class TestRoundTimes:
    def test_nothing_known(self) -> None:
        costs = RoundTimes().costs({"falcon": lambda depth: -(-depth // 2)})
        assert costs.verify(1) == 1 + NODE_COST
        assert costs.draft["falcon"](0) == 0
        one = FORWARD_COST * costs.verify(1)
        assert [costs.draft["falcon"](d) for d in (1, 2, 3)] == pytest.approx([one, one, 2 * one])

    def test_a_round(self) -> None:
        times = RoundTimes()
        times.learn(4, 0.04, {"draft": (3, 1, 0.006)})
        assert times.costs({"draft": levels}).verify(4) == pytest.approx(0.04)
        assert times.costs({"draft": levels}).draft["draft"](1) == pytest.approx(0.002)
        times.learn(1, 0.03, {"draft": (0, 0, 9.0)})
        assert times.costs({"draft": levels}).verify(1) == pytest.approx(0.03)
        assert times.costs({"draft": levels}).draft["draft"](3) == pytest.approx(0.006)

    def test_the_draft_scales_with_the_target_until_it_was_timed(self) -> None:
        times = RoundTimes()
        times.learn(1, 2.0, {})
        assert times.costs({"draft": levels}).draft["draft"](2) == pytest.approx(
            2 * FORWARD_COST * 2.0
        )

    def test_drafters_have_costs_of_their_own(self) -> None:
        times = RoundTimes()
        costs = times.costs({"falcon": levels, "tree": levels})
        for _ in range(2):
            times.learn(4, 0.04, {"falcon": (1, 0, 0.002), "tree": (2, 0, 0.02)})
        assert costs.draft["falcon"](1) == pytest.approx(0.002)
        assert costs.draft["tree"](1) == pytest.approx(0.01)

    def test_a_first_draft_that_takes_much_longer_than_expected_is_not_believed(self) -> None:
        times = RoundTimes()
        draft = times.costs({"draft": levels}, {"draft": 0.3}).draft["draft"]
        times.learn(1, 2.0, {"draft": (1, 0, 50.0)})
        assert draft(1) == pytest.approx(0.3 * 2.0)
        times.learn(1, 2.0, {"draft": (1, 0, 0.8)})
        assert draft(1) == pytest.approx(0.8)

    def test_reading_is_apart_from_drafting(self) -> None:
        """A drafter reads after a prompt, and after many rounds without a draft."""
        times = RoundTimes()
        costs = times.costs({"draft": levels})
        times.learn(1, 1.0, {"draft": (1, 300, 90.0)})
        assert costs.draft["draft"](1) == pytest.approx(FORWARD_COST)
        assert costs.read["draft"](300) == pytest.approx(300 * READ_COST * FORWARD_COST)
        assert costs.read["draft"](0) == 0.0
        for _ in range(3):
            times.learn(1, 1.0, {"draft": (1, 0, 0.2)})
        times.learn(1, 1.0, {"draft": (1, 40, 0.7)})
        assert costs.draft["draft"](1) == pytest.approx(0.2)
        assert costs.read["draft"](80) == pytest.approx(1.0)
        # A one-time compilation.
        times.learn(1, 1.0, {"draft": (1, 40, 600.0)})
        assert costs.read["draft"](80) <= 1.2

    def test_a_draft_that_also_read_shows_that_drafting_costs_less(self) -> None:
        times = RoundTimes()
        costs = times.costs({"draft": levels})
        for _ in range(3):
            times.learn(1, 1.0, {"draft": (1, 0, 5.0)})
        assert costs.draft["draft"](1) == pytest.approx(5.0)
        for _ in range(4):
            times.learn(1, 1.0, {"draft": (1, 30, 0.3)})
        assert costs.draft["draft"](1) == pytest.approx(0.3)

    def test_plain_steps_are_reliable_after_two_timings(self) -> None:
        times = RoundTimes()
        times.learn(9, 0.04, {})
        times.learn(9, 0.04, {})
        assert not times.verify.is_reliable(1)
        times.learn(1, 0.02, {})
        assert not times.verify.is_reliable(1)
        times.learn(1, 0.02, {})
        assert times.verify.is_reliable(1)
        assert times.verify.is_reliable(4)

    def test_target_times_that_are_not_known(self) -> None:
        """Draft timings are used only after the first target timing, which sets the unit."""
        times = RoundTimes()
        draft = times.costs({"draft": levels}).draft["draft"]
        times.learn(1, None, {"draft": (1, 1, 0.002)})
        assert not times.verify.has_timings
        assert draft(1) == pytest.approx(FORWARD_COST * times.verify(1))
        times.learn(1, 0.02, {})
        times.learn(4, None, {"draft": (1, 1, 0.002)})
        assert draft(1) == pytest.approx(0.002)
        assert times.verify(4) == pytest.approx(0.02 * (1 + 4 * NODE_COST) / (1 + NODE_COST))

    def test_acceptance_rates_are_kept(self) -> None:
        times = RoundTimes()
        times.memory(0, (0.5, 0.7)).stats.levels.count(1, False)
        assert times.memory(0, (0.5, 0.7)).stats.levels.rate(1) < LEVEL_PRIOR
        assert times.memory(1, (0.5, 0.7)).stats.levels.rate(1) == LEVEL_PRIOR

    def test_drafts_without_a_model_cost_nothing(self) -> None:
        times = RoundTimes()
        times.learn(4, 0.04, {"lookup": (0, 0, 0.001)})
        assert times.costs({"lookup": lambda depth: 0}).draft["lookup"](9) == 0.0


def test_another_number_of_rows_starts_from_the_most_similar_one() -> None:
    model, costs = build("qwen2"), {"draft": levels}
    for rows, seconds, reading in ((1, 1.0, 0.5), (6, 4.0, 0.6)):
        times = cached_times(model, "a", rows)
        times.costs(costs)
        for _ in range(2):
            times.learn(rows, seconds, {"draft": (1, 0, 0.2 * seconds)})
        times.learn(rows, seconds, {"draft": (1, 100, 0.2 * seconds + reading)})
        times.memory(0, (0.5, 0.7)).stats.levels.count(1, rows == 1)
    few, many = cached_times(model, "a", 2), cached_times(model, "a", 8)
    assert (few.verify(1), many.verify(6)) == pytest.approx((1.0, 4.0))
    assert not many.verify.is_reliable(8)
    for times, seconds, reading in ((few, 1.0, 0.5), (many, 4.0, 0.6)):
        found = times.costs(costs)
        assert found.draft["draft"](1) == pytest.approx(0.2 * seconds)
        assert found.read["draft"](100) == pytest.approx(reading)
    rates = [times.memory(0, (0.5, 0.7)).stats.levels.rate(1) for times in (few, many)]
    assert rates[0] > LEVEL_PRIOR > rates[1]
    # From then on they differ.
    few.memory(0, (0.5, 0.7)).stats.levels.count(1, False)
    assert cached_times(model, "a", 1).memory(0, (0.5, 0.7)).stats.levels.rate(1) == rates[0]


def test_times_are_kept_by_situation() -> None:
    model = build("qwen2")
    first = cached_times(model, "a", 1)
    assert cached_times(model, "a", 1) is first
    assert cached_times(model, "a", 2) is not first
    assert cached_times(model, "b", 1) is not first
    assert cached_times(build("qwen3"), "a", 1) is not first
    with compiling(True):
        assert cached_times(model, "a", 1) is not first
    assert cached_times(model, "a", 1) is first
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert cached_times(model, "a", 1) is not first
    finally:
        torch.set_num_threads(threads)


class TestTimings:
    def test_costs_from_timings(self) -> None:
        timings = {"verify": [[1, 1.0], [11, 2.0]], "draft": {"tree": [(2, 0.5)], "falcon": []}}
        with pytest.raises(OptionError):
            check_timings(timings)
        del timings["draft"]["falcon"]
        check_timings(timings)
        costs = Costs.from_timings(timings, ["tree"])
        assert costs.verify(6) == 1.5
        assert costs.draft["tree"](1) == 0.25

    def test_costs_of_drafters_that_are_not_named(self) -> None:
        timings = {"verify": [[1, 1.0]], "draft": {"tree": [[1, 0.5]], "*": [[2, 4.0]]}}
        costs = Costs.from_timings(timings, ["tree", "falcon"])
        assert (costs.draft["tree"](2), costs.draft["falcon"](1)) == (1.0, 2.0)

    @pytest.mark.parametrize(
        "timings",
        [
            {"verify": [[1, 1.0]]},
            {"verify": [], "draft": {}},
            {"verify": [[1]], "draft": {}},
            {"verify": [[1, "a"]], "draft": {}},
            {"verify": [[1, True]], "draft": {}},
            {"verify": [[1, -1.0]], "draft": {}},
            {"verify": [[1, float("nan")]], "draft": {}},
            {"verify": [[1, 1.0]], "draft": [[1, 1.0]]},
            {"verify": [[1, 1.0]], "draft": {}, "other": 1},
            [1],
        ],
    )
    def test_anything_else_is_refused(self, timings: Any) -> None:
        with pytest.raises(OptionError, match="seconds of a forward pass by nodes"):
            check_timings(timings)
