"""When another level is drafted: what rounds teach, and what a level may cost."""

from __future__ import annotations

import pytest

from hf_spec.drafting.length_policy import DraftedToken
from hf_spec.drafting.measured_policy import MeasuredPolicy
from hf_spec.drafting.sources import LEVEL_EXPECTATION


def policy(price: float, rows: int = 1) -> MeasuredPolicy:
    made = MeasuredPolicy(8)
    made.start(rows)
    made.price = lambda level: price
    return made


def newest(reach: float, row: int = 0) -> DraftedToken:
    return DraftedToken(row, 5, 0, reach, reach=reach)


def play(made: MeasuredPolicy, *reaches: float, reached: int, row: int = 0) -> None:
    """A round whose levels had these reaches, and of which so many were right."""
    made.limit(row)
    for reach in reaches:
        made.goes_on([newest(reach, row)])
    made.learn(row, drafted=len(reaches), reached=reached, known=reached + 1)


def test_a_likely_level_may_cost_more() -> None:
    worth = 0.95 * LEVEL_EXPECTATION
    assert policy(worth - 0.01).goes_on([newest(0.99)]) == [True]
    assert policy(worth + 0.01).goes_on([newest(0.99)]) == [False]
    assert policy(worth - 0.01).goes_on([newest(0.5)]) == [False]


def test_the_price_depends_on_the_levels_there_are() -> None:
    made = policy(0.0)
    made.limit(0)
    made.price = lambda level: 0.0 if level < 3 else 9.0
    assert [made.goes_on([newest(0.9)]) for _ in range(3)] == [[True], [True], [False]]
    made.limit(0)
    assert made.goes_on([newest(0.9)]) == [True]


def test_every_row_has_its_own_length() -> None:
    made = policy(0.5, rows=2)
    for _ in range(20):
        play(made, 0.9, 0.9, reached=2, row=0)
        play(made, 0.9, 0.9, reached=0, row=1)
    both = [newest(0.9, row) for row in (0, 1)]
    assert made.goes_on(both) == [True, False]
    made.restart(1)
    made.price = lambda level: 0.5
    assert made.goes_on(both) == [True, True]


@pytest.mark.parametrize(("reached", "better"), [(1, True), (0, False)])
def test_levels_of_a_likelihood_that_come_true_are_worth_more(reached: int, better: bool) -> None:
    made = policy(0.5 * LEVEL_EXPECTATION)
    for _ in range(10):
        play(made, 0.55, reached=reached)
    assert made.goes_on([newest(0.55)]) == [better]


def test_what_was_not_sent_and_not_refuted_tells_nothing() -> None:
    made, told = policy(0.3), policy(0.3)
    for _ in range(20):
        # One level and the bonus token were right; nobody knows of the third.
        for each, known in ((made, 2), (told, 3)):
            each.limit(0)
            for reach in (0.9, 0.9, 0.4):
                each.goes_on([newest(reach)])
            each.learn(0, drafted=3, reached=2, known=known)
    made.price = told.price = lambda level: 0.2
    assert made.goes_on([newest(0.4)]) == [True]
    assert told.goes_on([newest(0.4)]) == [False]


@pytest.mark.parametrize("reach", [float("nan"), 0.0, 1.0])
def test_odd_likelihoods(reach: float) -> None:
    made = policy(0.9)
    play(made, reach, reached=0)
    assert made.goes_on([newest(reach)]) == [False]
