"""SmolLM2-135M-Instruct in bfloat16: greedy output of a strategy is that of `none`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import FalconConfig, LookupConfig, NoneConfig
from hf_spec.common.prompts import load_prompts
from tests.compiler import needs_compiler

pytestmark = [pytest.mark.real, needs_compiler, pytest.mark.full]

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"


@pytest.fixture(scope="module")
def target(smollm2: Any) -> tuple[Any, Any]:
    model, tokenizer = smollm2
    return copy.deepcopy(model).to(torch.bfloat16), tokenizer


@pytest.mark.parametrize("compile_layers", [False, True], ids=["uncompiled", "compiled"])
def test_tokens(target: tuple[Any, Any], compile_layers: bool) -> None:
    model, tokenizer = target
    for prompt in load_prompts(per_task=1):
        given = {"input_ids": prompt.encode(tokenizer), "max_new_tokens": 48, "do_sample": False}
        none = model.generate(**given, spec_strategy=NoneConfig(compile=compile_layers))
        lookup = model.generate(**given, spec_strategy=LookupConfig(compile=compile_layers))
        assert torch.equal(lookup, none), prompt.id
        falcon = model.generate(
            **given,
            spec_strategy=FalconConfig(compile=compile_layers),
            assistant=ADAPTERS / "smollm2-135m-falcon",
        )
        assert torch.equal(falcon, none), prompt.id
