"""`verify` passes the real strategies and finds planted bugs."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_spec import DraftConfig, LookupConfig, TreeConfig
from hf_spec.common.prompts import Prompt
from hf_spec.engine.decode import drafter
from hf_spec.evaluation.lossless.mismatch import BUG
from hf_spec.evaluation.lossless.verify import PASSED, UNPROVEN, Verification, verify
from hf_spec.evaluation.settings import SamplingPlan, VerificationPlan
from hf_spec.methods.entries import Entry
from tests.biased_rules import NoResidual, OneTooMany
from tests.tiny_models import draft_model

PLAN = VerificationPlan(12, 1, SamplingPlan(draws=300, rows=150, look_ahead=8))
GREEDY = VerificationPlan(12, 0)


def entries() -> list[Entry]:
    draft = draft_model("llama")
    return [
        # On a tiny model, the cost model may draft no copies; a fixed length prevents that.
        Entry("lookup", LookupConfig(copy_length=7)),
        Entry("draft", DraftConfig(max_draft_tokens=2), draft),
        Entry("tree", TreeConfig(max_draft_tokens=2), draft),
    ]


@pytest.fixture
def run(model: PreTrainedModel, tokenizer: Any, prompts: list[Prompt]) -> Any:
    def check(plan: VerificationPlan, *chosen: Entry, target: Any = model) -> list[Verification]:
        return verify(target, tokenizer, prompts, chosen, plan)

    return check


def test_the_real_strategies_pass(run: Any) -> None:
    found = run(PLAN, *entries())
    assert [one.name for one in found] == ["lookup", "draft", "tree"]
    for one in found:
        assert one.verdict == (UNPROVEN if one.unproven else PASSED), one
        assert [output.prompt for output in one.greedy] == ["count-1", "letters-1"]
        assert all(output.new_tokens == 12 for output in one.greedy)
        assert all(output.differences == () for output in one.greedy)
        assert one.sampling.draws == 300
    # A random model does not copy its prompt.
    assert [one.unproven for one in found] == [["greedy"], [], []]


def test_a_verifier_that_accepts_one_token_too_many(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "NodeDraw", OneTooMany)
    for one in run(GREEDY, *entries()):
        assert not one.passed
        mistakes = [found for output in one.greedy for found in output.mistakes]
        assert mistakes
        assert {found.kind for found in mistakes} == {BUG}


def test_a_biased_residual(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter, "ResidualRejection", NoResidual)
    sampling = SamplingPlan(draws=400, rows=200, look_ahead=12)
    (found,) = run(VerificationPlan(4, 2, sampling), entries()[1])
    assert not any(output.differences for output in found.greedy)
    assert not found.sampling.passed
    assert not found.passed


@pytest.mark.full
def test_half_precision_differs_by_ties_alone(run: Any, model: PreTrainedModel) -> None:
    """LM head rows that differ by one bfloat16 step: rounding decides between their tokens."""
    target: Any = copy.deepcopy(model).to(torch.bfloat16)
    target.lm_head.weight = torch.nn.Parameter(target.lm_head.weight.detach().clone())
    with torch.no_grad():
        rows = target.lm_head.weight
        half = rows.shape[0] // 2
        signs = torch.randn(half, rows.shape[1], generator=torch.Generator().manual_seed(0)).sign()
        rows[half : 2 * half] = rows[:half] * (1 + signs * 2**-7)
    found = run(VerificationPlan(24, 0), *entries(), target=target)
    kinds = [d.kind for one in found for output in one.greedy for d in output.differences]
    assert set(kinds) == {"tie"}
    assert all(one.passed for one in found)


def test_a_strategy_stored_with_the_model_does_not_prove_itself(
    run: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drafter, "NodeDraw", OneTooMany)
    # Set on the instance and undone afterwards, because the model is shared.
    monkeypatch.setitem(vars(model.generation_config), "spec_strategy", "lookup")
    (found,) = run(GREEDY, entries()[0])
    assert model.generation_config.spec_strategy == "lookup"
    assert not found.passed


def test_the_report_is_json(run: Any) -> None:
    for plan in (PLAN, GREEDY):
        (found,) = run(plan, entries()[1])
        report = json.loads(json.dumps(found.to_dict()))
        assert report["passed"] is True
        assert len(report["greedy"]) == 2
    assert report["sampling"] is None


def test_progress(model: PreTrainedModel, tokenizer: Any, prompts: list[Prompt]) -> None:
    calls: list[None] = []
    verify(model, tokenizer, prompts, entries()[:2], GREEDY, progress=lambda: calls.append(None))
    assert len(calls) == 4
