"""Profiling: the parts of a step add up to the total, and the engine is left unchanged."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hf_spec import AutoConfig, GsdConfig, LookupConfig, NoneConfig, TreeConfig
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.runner import ModelRunner
from hf_spec.evaluation.bench.contenders import strategy
from hf_spec.evaluation.bench.profiling import PARTS, measure_step_cost, profiled
from hf_spec.methods.lookup.drafter import LookupDrafter
from tests.model_watch import snapshot
from tests.tiny_models import draft_model, settled_prompt, speculation


def current() -> list[Any]:
    return [LookupDrafter.draft, ModelRunner.forward, ModelRunner.keep, GenerationState.commit]


@pytest.mark.parametrize(
    "config", [NoneConfig(), LookupConfig(), TreeConfig(), GsdConfig(), AutoConfig()], ids=repr
)
def test_parts_add_up_and_the_output_stays(model: Any, config: Any) -> None:
    draft = draft_model("llama") if config.needs_assistant else None
    contender = strategy(model, config, draft)
    ids = settled_prompt("llama")
    expected = contender.run(ids, 20)
    start = time.perf_counter()
    with profiled() as seconds:
        run = contender.run(ids, 20)
    spent = time.perf_counter() - start
    assert torch.equal(run.sequence, expected.sequence)
    assert set(seconds) <= set(PARTS)
    assert all(part > 0 for part in seconds.values())
    assert 0.5 * spent < sum(seconds.values()) <= spent
    wanted = {"verify: forward", "verify: layout", "verification", "commit", "KV moves", "rest"}
    assert wanted <= set(seconds)
    assert ("draft: forward" in seconds) == config.needs_assistant
    assert "processors" not in seconds


@pytest.mark.parametrize("name", ["falcon", "eagle", "mtp", "block", "heads"])
def test_processors_and_heads_have_their_share(model: Any, name: str) -> None:
    given = speculation("llama", name)
    settings = {"do_sample": True, "top_k": 5}
    contender = strategy(model, given["spec_strategy"], given["assistant"], settings=settings)
    with profiled() as seconds:
        contender.run(settled_prompt("llama"), 8)
    assert seconds["processors"] > 0
    assert seconds["draft: forward"] > 0


def test_time_goes_where_it_is_spent(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = LookupDrafter.draft

    def slow(self: Any, state: Any, limits: Any) -> Any:
        time.sleep(0.02)
        return draft(self, state, limits)

    monkeypatch.setattr(LookupDrafter, "draft", slow)
    with profiled() as seconds:
        strategy(model, LookupConfig()).run(settled_prompt("llama"), 8)
    assert seconds["draft: rest"] > 0.02
    assert seconds["draft: rest"] > seconds["commit"]


def test_everything_is_put_back_after_an_error() -> None:
    before = current()
    stopped = profiled()
    stopped.__enter__()
    assert all(now is not then for now, then in zip(current(), before, strict=True))
    assert not stopped.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert current() == before


CONTEXT = list(range(3, 23))


def test_every_form_and_count_is_timed(model: Any) -> None:
    before = snapshot(model)
    seconds = measure_step_cost(model, CONTEXT, repeats=1, counts=(1, 2))
    assert seconds.keys() == {"transformers", "off", "auto"}
    for by_count in seconds.values():
        assert by_count.keys() == {1, 2}
        assert all(len(values) == 1 and values[0] > 0 for values in by_count.values())
    assert snapshot(model) == before
