"""Nested calls of `generate()`: each uses the current state of the model."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import LogitsProcessor

import hf_spec
from hf_spec.engine.fast import packed_linear as cpu_linear
from hf_spec.methods.registry import parse_strategy
from tests import tiny_models
from tests.compiler import needs_compiler
from tests.nested_calls import CHANGES, Contrast

pytestmark = needs_compiler

ARCHITECTURES = ("llama", "gemma3", "qwen2_sliding", "phi3", "olmo2", "opt", "gpt2", "mixtral")
STRATEGIES = ("lookup", "none", "tree", "draft")
CALL: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}


@pytest.fixture(autouse=True)
def every_weight_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the size limit: weights of tiny models are normally too small to pack."""
    monkeypatch.setattr(cpu_linear, "MIN_WEIGHT_ELEMENTS", 1)


def check(number: int) -> list[Any]:
    """Run a random nested call; return its parameters if its output is wrong, else []."""
    dice = random.Random(number)
    name = dice.choice([n for n in ARCHITECTURES if n in tiny_models.ARCHITECTURES])
    changes = sorted(CHANGES.keys() - ({"forward"} if name in {"opt", "mixtral"} else set()))
    change, strategy = dice.choice(changes), dice.choice(STRATEGIES)
    model = copy.deepcopy(tiny_models.build(name))
    prompt = {**tiny_models.prompts(name, dice.choice(("one", "ragged"))), **CALL}
    given = tiny_models.speculation(name, strategy)
    config = parse_strategy(given["spec_strategy"])
    compiled = {
        **given,
        "spec_strategy": type(config)(**{**vars(config), "compile": dice.random() < 0.7}),
    }
    lookup = {"spec_strategy": hf_spec.LookupConfig(compile=dice.random() < 0.7)}
    inner = dice.choice(({}, lookup, lookup))
    expected = model.generate(**prompt, logits_processor=[Contrast(model, change, {})])
    found = model.generate(**prompt, **compiled, logits_processor=[Contrast(model, change, inner)])
    again = model.generate(**prompt, **compiled)
    if not torch.equal(found, expected) or not torch.equal(again, model.generate(**prompt)):
        return [number, name, change, strategy, compiled, inner]
    return []


@pytest.mark.full
@pytest.mark.parametrize("start", range(0, 24, 6))
def test_random_nested_calls(start: int) -> None:
    assert [wrong for number in range(start, start + 6) if (wrong := check(number))] == []


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 1200, 50))
def test_many_random_nested_calls(start: int) -> None:
    assert [wrong for number in range(start, start + 50) if (wrong := check(number))] == []


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("how", ["disable_adapter", "set_adapter"])
def test_a_nested_call_under_another_adapter(how: str, compiled: bool) -> None:
    torch.manual_seed(0)
    options = {"target_modules": ["q_proj", "down_proj"], "init_lora_weights": False}
    model = get_peft_model(copy.deepcopy(tiny_models.build("llama")), LoraConfig(r=4, **options))
    model.add_adapter("other", LoraConfig(r=4, **options))
    model.eval()
    spec = {"spec_strategy": hf_spec.LookupConfig(compile=compiled)}

    class Contrasting(LogitsProcessor):
        def __init__(self, inner: dict[str, Any]):
            self.inner = inner

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            given = {"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}
            if how == "disable_adapter":
                with model.disable_adapter():
                    output = model.generate(**given, max_new_tokens=1, **self.inner)
            else:
                model.set_adapter("other")
                output = model.generate(**given, max_new_tokens=1, **self.inner)
                model.set_adapter("default")
            scores = scores.clone()
            scores[:, output[0, -1]] -= 3.0
            return scores

    prompt = {**tiny_models.prompts("llama", "one"), **CALL}
    expected = model.generate(**prompt, logits_processor=[Contrasting({})])
    assert not torch.equal(expected, model.generate(**prompt))
    for outer, inner in (({}, spec), (spec, {}), (spec, spec)):
        found = model.generate(**prompt, **outer, logits_processor=[Contrasting(inner)])
        assert torch.equal(found, expected)


def test_an_uncompiled_call_inside_a_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tested both ways: only the compiled call runs compiled layers."""
    from hf_spec.engine.fast.layer_call import BoundLayer

    model, runs = copy.deepcopy(tiny_models.build("llama")), []
    run = BoundLayer.__call__
    monkeypatch.setattr(
        BoundLayer, "__call__", lambda self, *given: (runs.append(1), run(self, *given))[1]
    )
    prompt = {**tiny_models.prompts("llama", "one"), **CALL}
    inside: list[tuple[bool, int]] = []

    def strategy(compiled: bool) -> Any:
        return hf_spec.NoneConfig(compile=compiled)

    class Inner(LogitsProcessor):
        def __init__(self, compiled: bool):
            self.compiled = compiled

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            before = len(runs)
            model.generate(input_ids, max_new_tokens=2, spec_strategy=strategy(self.compiled))
            inside.append((self.compiled, len(runs) - before))
            return scores

    for outer in (True, False):
        before = len(runs)
        call = {**prompt, "spec_strategy": strategy(outer)}
        model.generate(**call, logits_processor=[Inner(not outer)])
        outside = len(runs) - before - sum(count for _, count in inside)
        assert (outside > 0) == outer
        assert all((count > 0) == compiled for compiled, count in inside)
        inside.clear()
