"""Sampling check: draws of the real strategies pass, and planted biases are found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec import DraftConfig, LookupConfig, TreeConfig
from hf_spec.engine.decode import drafter
from hf_spec.evaluation.lossless.distribution import Comparison
from hf_spec.evaluation.lossless.sampling import (
    SampledText,
    SamplingResult,
    check_sampling,
    plain_probs,
    uncertain_text,
)
from hf_spec.evaluation.settings import SamplingPlan
from tests.biased_rules import NoResidual, RedrawnBonus
from tests.tiny_models import draft_model, repetitive_prompt, settled_prompt

PLAN = SamplingPlan(draws=400, rows=200, look_ahead=12)


@pytest.fixture
def prompts() -> list[Tensor]:
    return [settled_prompt("llama")[:, :30], repetitive_prompt()]


METHODS: dict[str, dict[str, Any]] = {
    # On a tiny model, the cost model may draft no copies; a fixed length prevents that.
    "lookup": {"spec_strategy": LookupConfig(max_matches=3, copy_length=7)},
    "draft": {"spec_strategy": DraftConfig(max_draft_tokens=2), "assistant": draft_model("llama")},
    "tree": {"spec_strategy": TreeConfig(max_draft_tokens=2), "assistant": draft_model("llama")},
}


@pytest.mark.by_default(name=("draft",))
@pytest.mark.parametrize("name", ["lookup", "draft"])
def test_real_strategies_pass(model: PreTrainedModel, prompts: list[Tensor], name: str) -> None:
    before = torch.get_rng_state()
    result = check_sampling(model, prompts, PLAN, **METHODS[name])
    assert result.passed, result
    assert result.p_value > 1e-3
    assert result.draws == 2 * PLAN.draws
    for text in result.texts:
        assert 0 < text.accepted < text.drafted
    assert 0 < result.detectable < 0.2
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.by_default(name=("draft",))
@pytest.mark.parametrize(
    ("name", "rule", "broken"),
    [("draft", "ResidualRejection", NoResidual), ("tree", "NodeDraw", RedrawnBonus)],
)
def test_planted_biases_are_found(
    model: PreTrainedModel,
    prompts: list[Tensor],
    name: str,
    rule: str,
    broken: type,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drafter, rule, broken)
    result = check_sampling(model, prompts, PLAN, **METHODS[name])
    assert not result.passed, result


def test_plain_probabilities_are_those_of_a_forward(model: PreTrainedModel) -> None:
    text = repetitive_prompt()
    paths = [(5, 9), (60, 1)]
    found = plain_probs(model, text, SamplingPlan(temperature=0.5))(paths)
    for path, probs in zip(paths, found, strict=True):
        ids = torch.cat([text, torch.tensor([path])], dim=1)
        with torch.no_grad():
            expected = (model(ids).logits[0, -1] / 0.5).double().softmax(dim=-1)
        assert torch.allclose(probs, expected, atol=1e-6)


def test_the_text_ends_where_the_model_is_least_sure(model: PreTrainedModel) -> None:
    prompt = repetitive_prompt()
    text = uncertain_text(model, prompt, 8)
    answer = model.generate(prompt, max_new_tokens=8, do_sample=False)
    assert text.tolist() == answer[:, : text.shape[1]].tolist()
    with torch.no_grad():
        best = model(answer).logits[0, prompt.shape[1] - 1 : -1].softmax(dim=-1).amax(dim=-1)
    position = text.shape[1] - prompt.shape[1]
    assert (best[position] - 0.5).abs() == (best - 0.5).abs().min()


class TestResult:
    def result(self, *comparisons: Comparison) -> SamplingResult:
        return SamplingResult(tuple(SampledText(one, 10, 5) for one in comparisons), 1e-4)

    def test_one_bad_text_among_good_ones(self) -> None:
        good = [Comparison(500, 31, 30.0)] * 3
        assert self.result(*good).passed
        assert not self.result(*good, Comparison(500, 3, 40.0)).passed

    def test_many_slightly_bad_texts(self) -> None:
        slightly = Comparison(500, 31, 52.0)
        assert self.result(slightly).passed
        assert not self.result(*[slightly] * 8).passed

    def test_impossible(self) -> None:
        assert self.result(Comparison(500, 31, 30.0, impossible=1)).p_value == 0.0

    def test_nothing_drawn(self) -> None:
        assert self.result().passed
