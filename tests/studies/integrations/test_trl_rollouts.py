"""TRL rollout study: every rollout of a real training is timed with and without speculation."""

from __future__ import annotations

import copy

import pytest

pytest.importorskip("trl", reason="needs the extra 'rl'")

from examples.studies.integrations import trl_rollouts
from tests.cli.answer.conftest import make_tokenizer
from tests.tiny_models import build

pytestmark = pytest.mark.integration


@pytest.mark.parametrize("trainer", trl_rollouts.TRAINERS)
@pytest.mark.parametrize("greedy", [True, False])
def test_rollouts_are_timed_beside_plain(
    trainer: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_rollouts, "NEW_TOKENS", 12)
    tokenizer = make_tokenizer()
    tokenizer.padding_side = "left"
    model = copy.deepcopy(build("llama"))
    found = trl_rollouts.measure(trainer, model, tokenizer, "lookup", greedy, steps=3)
    assert len(found["rollouts"]) == 3
    assert found["same"] == ("3 of 3" if greedy else None)
    assert found["least"] <= found["speed"] <= found["most"]
    assert all(one["plain"] > 0 and one["forwards"] > 0 for one in found["rollouts"])
