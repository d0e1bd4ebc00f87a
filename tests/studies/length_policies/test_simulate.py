"""Simulation of length policies, and limits on what the cost model may lose."""

from __future__ import annotations

import random

import pytest

from examples.studies.length_policies.simulate import (
    SCALE,
    Answer,
    Machine,
    compare,
    comparison_table,
    fixed_time,
    study,
)
from hf_spec.drafting.cost_model import cost_model_drafter

NEW_TOKENS = 128
PROMPT = 20


@pytest.fixture(autouse=True)
def cheap_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore the clock and the cached times, which the study replaces to simulate costs."""
    monkeypatch.setattr(cost_model_drafter, "clock_of", cost_model_drafter.clock_of)
    monkeypatch.setattr(cost_model_drafter, "cached_times", cost_model_drafter.cached_times)


def answers(acceptance: float, count: int = 4) -> list[Answer]:
    """Return responses of which a draft model predicts a share, with noisy probabilities."""
    rng = random.Random(7)
    made = []
    for _ in range(count):
        tokens = [rng.randrange(100, 200) for _ in range(NEW_TOKENS)]
        proposals = []
        for token in tokens:
            right = rng.random() < acceptance
            chance = min(0.98, max(0.02, rng.gauss(acceptance, 0.2) + 0.15 * right))
            proposals.append([token if right else 1000, round(SCALE * chance)])
        made.append(Answer("test", [1] * PROMPT, tokens, proposals))
    return made


def test_a_fixed_length() -> None:
    proposals = [[5, 900], [6, 900], [0, 900], [8, 900], [9, 900]]
    answer = Answer("test", [1, 2, 3], [5, 6, 7, 8, 9], proposals)
    machine = Machine(draft_cost=0.1, node_cost=0.01, read_cost=0.0)
    assert fixed_time(answer, machine, 0) == 5.0
    # Three tokens, then two, of which the last is a bonus token.
    assert fixed_time(answer, machine, 2) == pytest.approx(1.02 + 0.2 + 1.01 + 0.1)
    # The first draft reads three prompt tokens, the second three new ones: two extra each.
    reading = Machine(draft_cost=0.1, node_cost=0.01, read_cost=0.5)
    extra = fixed_time(answer, reading, 2) - fixed_time(answer, machine, 2)
    assert extra == pytest.approx(0.05 * (2 + 2))


@pytest.mark.parametrize("strategy", ["draft", "tree"])
@pytest.mark.parametrize("draft_cost", [0.05, 0.2, 0.5])
def test_drafts_that_never_pay_cost_a_few_steps(strategy: str, draft_cost: float) -> None:
    for cold in (True, False):
        cell = study(answers(0.0), Machine(draft_cost, 0.02), strategy, cold)
        # This includes reading the prompt.
        assert cell["over_none"] < (1.045 if cold else 1.03)
        assert cell["worst_over_none"] < 1.05


@pytest.mark.parametrize(("draft_cost", "acceptance"), [(0.05, 0.6), (0.2, 0.75), (0.35, 0.8)])
def test_drafts_that_pay_are_nearly_as_fast_as_the_best_fixed_length(
    draft_cost: float, acceptance: float
) -> None:
    cell = study(answers(acceptance), Machine(draft_cost, 0.02), "draft", cold=True)
    assert cell["over_best_fixed"] < 1.06
    assert cell["over_best_of_each"] < 1.1


@pytest.mark.parametrize("seed", range(3))
def test_outliers_do_not_end_drafting(seed: int) -> None:
    noisy = Machine(0.2, 0.02, noise=0.1, outlier_share=0.05, outlier_factor=10.0)
    cell = study(answers(0.8), noisy, "draft", cold=True, seed=seed)
    assert cell["over_best_fixed"] < 1.1
    assert cell["worst_over_none"] < 0.9


def test_lookups_cost_nothing_where_nothing_repeats() -> None:
    rng = random.Random(3)
    texts = [
        Answer("test", list(range(50)), [rng.randrange(9000) for _ in range(NEW_TOKENS)], [])
        for _ in range(2)
    ]
    texts = [Answer(t.task, t.prompt, t.tokens, [[0, 0]] * NEW_TOKENS) for t in texts]
    assert study(texts, Machine(0.1, 0.08), "lookup", cold=True)["worst_over_none"] < 1.01


def copies_and_chance_matches() -> list[Answer]:
    """Return answers that copy a long prompt, then others in which short matches mean nothing."""
    rng = random.Random(5)
    made = []
    for task in ("copied", "new"):
        for _ in range(4):
            prompt = [rng.randrange(100, 1000) for _ in range(500)]
            tokens = prompt[200 : 200 + NEW_TOKENS]
            if task == "new":
                prompt = [rng.randrange(100, 130) for _ in range(60)]
                tokens = [rng.randrange(100, 130) for _ in range(NEW_TOKENS)]
            proposals = [[token, 900] if rng.random() < 0.9 else [1000, 300] for token in tokens]
            made.append(Answer(task, prompt, tokens, proposals))
    return made


def test_auto_beside_the_best_single_strategy() -> None:
    cell = compare(copies_and_chance_matches(), Machine(0.33, 0.03), num_seeds=1)
    assert set(cell["speedups"]) == {"copied", "new", "all"}
    for speedups in cell["speedups"].values():
        assert speedups["none"] == 1.0
        assert speedups["auto"] >= 0.89 * max(speedups[n] for n in ("draft", "tree", "lookup"))
    assert cell["speedups"]["copied"]["lookup"] > cell["speedups"]["copied"]["tree"]
    assert cell["speedups"]["new"]["lookup"] < cell["speedups"]["new"]["tree"]
    assert comparison_table([cell]).count("copied") == 1
