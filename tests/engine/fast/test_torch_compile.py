"""Targets compiled with `torch.compile`: their original code runs, and they are unchanged."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hf_spec.engine.fast.torch_compile import original_forwards
from tests import tiny_models


def never(graph: Any, inputs: Any) -> Any:
    raise AssertionError("compiled code ran")


def whole_model(model: nn.Module) -> None:
    model.compile(backend=never)


def its_forward(model: nn.Module) -> None:
    model.forward = torch.compile(model.forward, backend=never)


def its_layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(backend=never)
    model.lm_head.forward = torch.compile(model.lm_head.forward, backend=never)


WAYS = (whole_model, its_forward, its_layers)


def settings_of(model: nn.Module) -> list[tuple[Any, Any]]:
    return [
        (vars(module).get("_compiled_call_impl"), vars(module).get("forward"))
        for module in model.modules()
    ]


@pytest.mark.parametrize("way", WAYS)
def test_original_code_runs(way: Callable[[nn.Module], None]) -> None:
    model = copy.deepcopy(tiny_models.build("llama"))
    call = {**tiny_models.prompts("llama", "one"), "max_new_tokens": 6, "do_sample": False}
    plain = model.generate(**call)
    way(model)
    before = settings_of(model)
    assert torch.equal(model.generate(**call, spec_strategy="lookup"), plain)
    assert settings_of(model) == before
    with pytest.raises(Exception, match="compiled code ran"):
        model.generate(**call)


def test_blocks_overlap() -> None:
    """A second generation stays uncompiled when the first one ends."""
    module = nn.Linear(2, 2)
    module.compile(backend=never)
    its_forward(module)
    before = settings_of(module)
    first, second = original_forwards(module), original_forwards(module)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert module(torch.ones(1, 2)).shape == (1, 2)
    second.__exit__(None, None, None)
    assert settings_of(module) == before
    with pytest.raises(Exception, match="compiled code ran"):
        module(torch.ones(1, 2))


def test_other_modules_are_left_alone() -> None:
    module = nn.Linear(2, 2)
    before = dict(vars(module))
    with original_forwards(module):
        assert vars(module) == before
