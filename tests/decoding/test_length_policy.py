"""Length policies: how long a row drafts, and what it learns."""

from __future__ import annotations

import pytest

from hf_spec.decoding.length_policy import POLICIES, make_policy
from hf_spec.errors import OptionError


def test_static_never_changes() -> None:
    policy = make_policy("static", 5, 0.9)
    policy.start(2)
    policy.observe(0, drafted=5, accepted=0)
    assert [policy.limit(0), policy.limit(1)] == [5, 5]
    assert policy.goes_on(0, position=3, probability=0.0)


def test_heuristic_adds_two_or_takes_one_per_row() -> None:
    policy = make_policy("heuristic", 3, 0.4)
    policy.start(3)
    policy.observe(0, drafted=3, accepted=3)
    policy.observe(1, drafted=3, accepted=2)
    policy.observe(2, drafted=0, accepted=0)
    assert [policy.limit(row) for row in range(3)] == [5, 2, 3]
    for _ in range(4):
        policy.observe(1, drafted=2, accepted=0)
    assert policy.limit(1) == 1, "never fewer than one"
    policy.start(3)
    assert [policy.limit(row) for row in range(3)] == [3, 3, 3]


@pytest.mark.parametrize(("probability", "goes_on"), [(0.39, False), (0.4, True), (1.0, True)])
def test_confidence_stops_behind_an_unlikely_token(probability: float, goes_on: bool) -> None:
    policy = make_policy("confidence", 5, 0.4)
    policy.start(1)
    assert policy.goes_on(0, position=0, probability=probability) is goes_on
    assert policy.limit(0) == 5


def test_every_policy_can_be_made_and_others_are_named() -> None:
    for name in POLICIES:
        assert make_policy(name, 4, 0.4).max_draft_tokens == 4
    with pytest.raises(OptionError, match=r"'bold'; known: .*confidence, heuristic, static"):
        make_policy("bold", 4, 0.4)
