"""Out-of-memory errors: operations are retried once after memory is freed.

Operations with side effects that a retry would repeat raise the error at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessor

import hf_spec
from hf_spec.backend.device import graph_store
from hf_spec.backend.device.graph_store import StoredGraphs
from hf_spec.engine.decode.verifiers import NodeDraw, ResidualRejection
from hf_spec.engine.model_call import ModelCall
from hf_spec.methods.feature_pairs.runner import HeadRunner
from tests import hybrid_models, tiny_models
from tests.falcon_reference import random_head
from tests.generation.test_own_prefill import longrope


def fail_at(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, number: int, times: int = 1
) -> list[int]:
    """Make a method fail after it ran, in `times` calls from `number` on; return the call log."""
    method, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(len(calls) + 1)
        result = method(*args, **kwargs)
        if number <= len(calls) < number + times:
            raise torch.OutOfMemoryError("no room")
        return result

    monkeypatch.setattr(owner, name, failing)
    return calls


def falcon() -> dict[str, Any]:
    return {"spec_strategy": hf_spec.FalconConfig(tree="chain"), "assistant": random_head("llama")}


def generate(model: Any, **options: Any) -> Any:
    # Longer than the limit past which the LongRoPE model is supported.
    prompt = tiny_models.ragged_batch((20, 31, 17))
    call = {**prompt, "max_new_tokens": 10, "do_sample": False, "return_dict_in_generate": True}
    return model.generate(**{**call, **options})


# Class, method and call that fail, the model, and the options of the drafter.
CASES: dict[str, tuple[type, str, int, Callable[[], Any], Callable[[], dict[str, Any]]]] = {
    "verification": (NodeDraw, "verify", 2, lambda: tiny_models.build("llama"), dict),
    "rectangular": (ModelCall, "__call__", 2, lambda: tiny_models.build("bloom"), dict),
    "own prefill": (ModelCall, "prefill", 1, longrope, dict),
    "recurrent head": (HeadRunner, "_compute", 2, lambda: tiny_models.build("llama"), falcon),
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs_again(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, number, build, options = CASES[name]
    model, chosen = build(), options() or {"spec_strategy": "lookup"}
    plain, usual = generate(model), generate(model, **chosen)
    other = torch.nn.Linear(1, 1)
    graph_store.put(other, StoredGraphs("a", None, 1, ({}, {}), {}, None))
    calls = fail_at(monkeypatch, owner, method, number)
    output = generate(model, **chosen)
    assert len(calls) > number
    assert other not in graph_store._stored
    assert torch.equal(output.sequences, plain.sequences)
    found, expected = output.spec_stats, usual.spec_stats
    assert found.target_tokens == expected.target_tokens
    assert found.target_forwards == expected.target_forwards
    assert found.accepted_tokens == expected.accepted_tokens
    # Statistics count only retries of the target.
    assert found.memory_retries == (name != "recurrent head")


@pytest.mark.parametrize("name", CASES)
def test_it_is_raised_the_second_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, number, build, options = CASES[name]
    chosen = options() or {"spec_strategy": "lookup"}
    calls = fail_at(monkeypatch, owner, method, number, times=2)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        generate(build(), **chosen)
    assert len(calls) == number + 1


class CountingProcessor(LogitsProcessor):
    """User-defined processor, which may be stateful."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores


def test_a_processor_that_may_remember_is_not_called_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = fail_at(monkeypatch, NodeDraw, "verify", 1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        generate(
            tiny_models.build("llama"),
            spec_strategy="lookup",
            logits_processor=[CountingProcessor()],
        )
    assert len(calls) == 1


def test_recurrent_states_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = hybrid_models.build("qwen3_next")
    calls = fail_at(monkeypatch, ModelCall, "__call__", 1)
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        generate(model, spec_strategy="lookup")
    assert len(calls) == 1


def test_residual_rejection_draws_again(monkeypatch: pytest.MonkeyPatch) -> None:
    options = tiny_models.speculation("llama", "draft")
    calls = fail_at(monkeypatch, ResidualRejection, "verify", 2)
    output = generate(tiny_models.build("llama"), **{**options, "do_sample": True})
    assert len(calls) > 2
    assert output.spec_stats.memory_retries == 1
