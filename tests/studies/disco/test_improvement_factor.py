"""Improvement factor: known values, agreement with a simulation, and the cost ratio."""

from __future__ import annotations

import random
from typing import Any

import pytest

from examples.studies.disco.improvement_factor import cost_ratio, improvement_factor
from hf_spec import DraftConfig, SpecStats
from hf_spec.evaluation.bench.contenders import strategy
from tests.tiny_models import draft_model, settled_prompt


@pytest.mark.parametrize(
    ("acceptance_rate", "draft_tokens", "cost", "expected"),
    [
        (0.0, 4, 0.0, 1.0),
        (0.0, 4, 0.25, 0.5),
        (0.8, 0, 0.05, 1.0),
        (1.0, 5, 0.0, 6.0),
        (1.0, 5, 0.2, 3.0),
        (0.5, 2, 0.125, 1.4),
        (0.8, 5, 0.05, (1 - 0.8**6) / (0.2 * 1.25)),
    ],
)
def test_known_values(
    acceptance_rate: float, draft_tokens: int, cost: float, expected: float
) -> None:
    found = improvement_factor(acceptance_rate, draft_tokens, cost)
    assert found == pytest.approx(expected, rel=1e-12)


def test_it_is_what_rounds_give_on_average() -> None:
    draws = random.Random(0)
    rate, length, cost, rounds = 0.7, 6, 0.1, 20_000
    tokens = 0
    for _ in range(rounds):
        accepted = 0
        while accepted < length and draws.random() < rate:
            accepted += 1
        tokens += accepted + 1
    simulated = tokens / (rounds * (1 + length * cost))
    assert improvement_factor(rate, length, cost) == pytest.approx(simulated, rel=0.01)


@pytest.mark.parametrize("arguments", [(-0.1, 1, 0.1), (1.1, 1, 0.1), (0.5, -1, 0.1), (0.5, 1, -1)])
def test_arguments_out_of_range(arguments: Any) -> None:
    with pytest.raises(ValueError, match="acceptance_rate"):
        improvement_factor(*arguments)


def test_cost_ratio_of_given_statistics() -> None:
    stats = SpecStats(
        [], target_forwards=4, draft_forwards=10, draft_seconds=1.0, verify_seconds=2.0
    )
    assert cost_ratio(stats) == pytest.approx(0.2)
    with pytest.raises(ValueError, match="no draft"):
        cost_ratio(SpecStats([], target_forwards=4, verify_seconds=1.0))


def test_cost_ratio_of_a_generation(model: Any) -> None:
    run = strategy(model, DraftConfig(), draft_model("llama")).run(settled_prompt("llama"), 24)
    assert run.stats is not None
    # The draft model has two of the three layers, and drafting has overhead.
    assert 0.1 < cost_ratio(run.stats) < 10
