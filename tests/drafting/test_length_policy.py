"""Length policies: draft length of a row, and learning from outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_spec import DraftConfig
from hf_spec.common.errors import OptionError
from hf_spec.drafting.cost_model.acceptance_stats import LEVEL_PRIOR
from hf_spec.drafting.length_policy import (
    DraftedToken,
    HeadPolicy,
    LengthPolicy,
    LevelCost,
    MeasuredPolicy,
    known_policies,
    make_policy,
    register_policy,
)
from tests.tiny_models import build


def policy(name: str, max_draft_tokens: int = 5) -> Any:
    config = DraftConfig(length_policy=name, max_draft_tokens=max_draft_tokens)
    return make_policy(config, build("llama"))


def drafted(*probabilities: float) -> list[DraftedToken]:
    return [DraftedToken(row, 7, 0, p) for row, p in enumerate(probabilities)]


def test_static_never_changes() -> None:
    static = policy("static")
    static.start(2)
    static.observe(0, drafted=5, accepted=0)
    assert [static.limit(0), static.limit(1)] == [5, 5]
    assert static.goes_on(drafted(0.0, 1.0)) == [True, True]


@pytest.mark.parametrize("name", ["static", "heuristic", "confidence"])
def test_policies_that_look_at_no_distribution_score_none(name: str) -> None:
    assert policy(name).score(torch.ones(2, 8) / 8, [0, 3]) is None


def test_heuristic_adds_two_or_takes_one_per_row() -> None:
    heuristic = policy("heuristic", 3)
    heuristic.start(3)
    heuristic.observe(0, drafted=3, accepted=3)
    heuristic.observe(1, drafted=3, accepted=2)
    heuristic.observe(2, drafted=0, accepted=0)
    assert [heuristic.limit(row) for row in range(3)] == [5, 2, 3]
    for _ in range(4):
        heuristic.observe(1, drafted=2, accepted=0)
    assert heuristic.limit(1) == 1, "never fewer than one"
    heuristic.restart(1)
    assert [heuristic.limit(row) for row in range(3)] == [5, 3, 3], "a new sequence in one row"
    heuristic.start(3)
    assert [heuristic.limit(row) for row in range(3)] == [3, 3, 3]


def test_confidence_stops_each_row_behind_an_unlikely_token() -> None:
    confidence = policy("confidence")
    assert confidence.goes_on(drafted(0.39, 0.4, 1.0)) == [False, True, True]
    assert confidence.limit(0) == 5


def test_a_confidence_head_stops_each_row_after_a_token_that_it_doubts() -> None:
    head = HeadPolicy(5, 0.5)
    tokens = [
        replace(token, score=score)
        for token, score in zip(drafted(0.1, 0.9, 1.0), (0.5, 0.4, 1.0), strict=True)
    ]
    assert head.goes_on(tokens) == [True, False, True]
    assert head.limit(0) == 5


def test_others_are_named() -> None:
    assert {"confidence", "disco", "heuristic", "measured", "static"} <= set(known_policies())
    with pytest.raises(
        OptionError, match=r"'bold'; known: .*confidence, disco, head, heuristic, measured, static"
    ):
        DraftConfig(length_policy="bold")
    with pytest.raises(OptionError, match="unknown length_policy 7"):
        DraftConfig(length_policy=7)  # type: ignore[arg-type]


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'static' is already"):
        register_policy("static", lambda options, target: LengthPolicy(1))


def measured_policy(cost: float, rows: int = 1) -> MeasuredPolicy:
    made = MeasuredPolicy(8)
    made.start(rows)
    made.level_cost = lambda level: LevelCost(shared=cost)
    return made


def newest_level(reach: float, row: int = 0) -> DraftedToken:
    return DraftedToken(row, 5, 0, reach, reach=reach)


def play(made: MeasuredPolicy, *reaches: float, reached: int, row: int = 0) -> None:
    """Play a round whose levels have these reaches; the first `reached` of them are accepted."""
    made.limit(row)
    for reach in reaches:
        made.goes_on([newest_level(reach, row)])
    made.learn(row, drafted=len(reaches), accepted=reached, gained=reached + 1)


def test_a_likely_level_may_cost_more() -> None:
    worth = 0.95 * LEVEL_PRIOR
    assert measured_policy(worth - 0.01).goes_on([newest_level(0.99)]) == [True]
    assert measured_policy(worth + 0.01).goes_on([newest_level(0.99)]) == [False]
    assert measured_policy(worth - 0.01).goes_on([newest_level(0.5)]) == [False]


def test_the_cost_depends_on_the_drafted_levels() -> None:
    made = measured_policy(0.0)
    made.limit(0)
    made.level_cost = lambda level: LevelCost(0.0 if level < 3 else 9.0)
    assert [made.goes_on([newest_level(0.9)]) for _ in range(3)] == [[True], [True], [False]]
    made.limit(0)
    assert made.goes_on([newest_level(0.9)]) == [True]


def test_every_row_has_its_own_length() -> None:
    made = measured_policy(0.0, rows=2)
    made.level_cost = lambda level: LevelCost(per_row=0.4)
    for _ in range(20):
        play(made, 0.9, 0.9, reached=2, row=0)
        play(made, 0.9, 0.9, reached=0, row=1)
    both = [newest_level(0.9, row) for row in (0, 1)]
    assert made.goes_on(both) == [True, False]
    made.restart(1)
    assert made.goes_on(both) == [True, True]


def test_a_pass_runs_if_it_pays_for_all_rows_together() -> None:
    made = measured_policy(0.0, rows=3)
    likely, unlikely = 0.95 * LEVEL_PRIOR, 0.05 * LEVEL_PRIOR
    newest = [newest_level(reach, row) for row, reach in enumerate((0.95, 0.95, 0.05))]
    for cost, pays in (
        (LevelCost(2 * likely, 0.0), [True, True, True]),
        (LevelCost(2 * likely + unlikely, 0.0), [False, False, False]),
        (LevelCost(0.0, unlikely), [True, True, False]),
        (LevelCost(1.0, likely - 0.4), [False, False, False]),
        (LevelCost(0.7, likely - 0.4), [True, True, False]),
    ):
        made.level_cost = lambda level, cost=cost: cost
        assert made.goes_on(newest) == pays
    assert made.goes_on([]) == []


@pytest.mark.parametrize(("reached", "better"), [(1, True), (0, False)])
def test_levels_of_a_likelihood_that_come_true_gain_more(reached: int, better: bool) -> None:
    made = measured_policy(0.5 * LEVEL_PRIOR)
    for _ in range(10):
        play(made, 0.55, reached=reached)
    assert made.goes_on([newest_level(0.55)]) == [better]


def test_what_was_not_sent_and_not_refuted_tells_nothing() -> None:
    made, told = measured_policy(0.3), measured_policy(0.3)
    for _ in range(20):
        # `made`: a level and the bonus token matched, and the third level was not verified.
        # `told`: the third level was refuted.
        for each, known in ((made, 2), (told, 3)):
            each.limit(0)
            for reach in (0.9, 0.9, 0.4):
                each.goes_on([newest_level(reach)])
            each.learn(0, drafted=3, accepted=2, gained=known)
    made.level_cost = told.level_cost = lambda level: LevelCost(0.2)
    assert made.goes_on([newest_level(0.4)]) == [True]
    assert told.goes_on([newest_level(0.4)]) == [False]


@pytest.mark.parametrize("reach", [float("nan"), 0.0, 1.0])
def test_odd_likelihoods(reach: float) -> None:
    made = measured_policy(0.9)
    play(made, reach, reached=0)
    assert made.goes_on([newest_level(reach)]) == [False]
