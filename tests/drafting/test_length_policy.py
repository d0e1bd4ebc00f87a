"""Length policies: how long a row drafts, and what it learns."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_spec import DraftConfig
from hf_spec.drafting.length_policy import (
    DraftedToken,
    LengthPolicy,
    known_policies,
    make_policy,
    register_policy,
)
from hf_spec.errors import OptionError
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


def test_others_are_named() -> None:
    assert {"confidence", "disco", "heuristic", "measured", "static"} <= set(known_policies())
    with pytest.raises(
        OptionError, match=r"'bold'; known: .*confidence, disco, heuristic, measured, static"
    ):
        DraftConfig(length_policy="bold")
    with pytest.raises(OptionError, match="unknown length_policy 7"):
        DraftConfig(length_policy=7)  # type: ignore[arg-type]


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'static' already"):
        register_policy("static", lambda options, target: LengthPolicy(1))
