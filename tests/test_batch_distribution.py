"""Continuous batching samples from each prompt's distribution: chi-square, and a broken variant.

Prompts of different lengths reuse every slot, and token 2 ends a sequence.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hf_spec.engine.runner import ModelRunner
from tests.test_distribution import (
    ALPHA,
    PLAIN,
    RAGGED,
    REJECTED,
    REPETITION,
    STEPS,
    TOP_K,
    arguments,
    exact,
    p_value,
    tiny,
)

END = 2
SLOTS = 48
DRAWS = 400


def sample(settings: dict[str, Any], strategy: str, draws: int) -> Tensor:
    """Return (prompts, draws, STEPS) tokens, zeros after the end of a sequence."""
    torch.manual_seed(5)
    outputs = tiny(0).generate_batch(
        RAGGED * draws,
        max_batch=SLOTS,
        do_sample=True,
        max_new_tokens=STEPS,
        eos_token_id=END,
        **{"top_k": 0, **settings},
        **arguments(strategy),
    )
    rows = [torch.tensor(output.generated_tokens) for output in outputs.values()]
    padded = torch.stack([F.pad(row, (0, STEPS - len(row))) for row in rows])
    return padded.reshape(draws, len(RAGGED), STEPS).transpose(0, 1)


def worst_p_value(settings: dict[str, Any], strategy: str, draws: int = DRAWS) -> float:
    drawn = sample(settings, strategy, draws)
    return min(
        p_value(tokens, exact(prompt, settings, END))
        for prompt, tokens in zip(RAGGED, drawn, strict=True)
    )


def test_every_sequence_has_its_own_distribution() -> None:
    assert worst_p_value(REPETITION, "draft") > ALPHA


def test_a_slot_that_remembers_fails_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that keeps two tokens of the previous sequence in its KV cache is detected."""
    monkeypatch.setattr(ModelRunner, "restart", lambda self, row: self.shorten(row, 2))
    assert worst_p_value(PLAIN, "draft") < REJECTED


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, TOP_K, REPETITION], ids=["plain", "top_k", "penalty"])
@pytest.mark.parametrize(
    "strategy", ["lookup", "draft", "disco", "merging", "siblings", "falcon", "sdsat"]
)
def test_with_more_draws(strategy: str, settings: dict[str, Any]) -> None:
    assert worst_p_value(settings, strategy, 4000) > ALPHA
