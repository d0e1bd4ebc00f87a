"""Layers with hooks, in training mode, or in other dtypes run uncompiled; reports say why."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import hf_spec
from tests import tiny_models
from tests.compiler import needs_compiler

pytestmark = needs_compiler


def llama() -> Any:
    return copy.deepcopy(tiny_models.build("llama"))


def answer(target: Any, **options: Any) -> torch.Tensor:
    prompt = tiny_models.prompts("llama", "one")
    ids: torch.Tensor = target.generate(**prompt, max_new_tokens=10, do_sample=False, **options)
    return ids


def test_hooks_and_training_are_obstacles() -> None:
    target = llama()
    seen: list[Any] = []
    first, second, _ = target.model.layers
    hook = first.mlp.register_forward_hook(lambda *given: seen.append(given))
    second.train()
    refused = hf_spec.compile(target).refused
    assert refused == {
        "model.layers.0": "it has hooks or a forward of its own",
        "model.layers.1": "it is in training mode",
    }
    seen.clear()
    answer(target, spec_strategy="lookup")
    assert seen, "the hook is called"
    hook.remove()
    second.eval()
    assert hf_spec.compile(target).layers == 3


def test_a_dtype_that_is_not_compiled() -> None:
    report = hf_spec.compile(llama().double())
    reason = "it has weights in float64; float32, bfloat16 are compiled"
    assert report.refused == {f"model.layers.{index}": reason for index in range(3)}
    assert report.programs == 0


def test_a_hook_of_all_modules_is_called() -> None:
    target = llama()
    hf_spec.compile(target)
    before = answer(target, spec_strategy="lookup")
    hook = register_module_forward_hook(
        lambda module, given, result: -3 * result if isinstance(module, nn.Linear) else None
    )
    try:
        found = answer(target, spec_strategy="lookup")
        assert torch.equal(found, answer(target))
    finally:
        hook.remove()
    assert not torch.equal(found, before)
    assert hf_spec.compile(target).layers == 3
