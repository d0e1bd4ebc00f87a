"""Fixtures of the cost model's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_spec.drafting.cost_model import cost_curves, cost_model_drafter
from hf_spec.drafting.cost_model.cost_curves import RoundTimes
from hf_spec.methods.draft_model.drafter import DraftModelDrafter


@pytest.fixture(autouse=True)
def cheap_drafts() -> None:
    """Override the parent fixture: tests here set their own costs or measure real times."""


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Set the costs of a node and of a draft forward pass, relative to the target's."""

    def set_costs(node: float, forward: float) -> None:
        monkeypatch.setattr(cost_model_drafter, "cached_times", lambda *_: RoundTimes())
        monkeypatch.setattr(RoundTimes, "learn", lambda *_: None)
        monkeypatch.setattr(cost_curves, "NODE_COST", node)
        monkeypatch.setattr(cost_curves, "FORWARD_COST", forward)
        monkeypatch.setattr(DraftModelDrafter, "relative_cost", lambda *_: None)

    return set_costs
