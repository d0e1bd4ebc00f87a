"""SmolLM2-135M-Instruct in bfloat16: greedy output with a strategy equals that of `none`."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec import FalconConfig, LookupConfig, NoneConfig
from hf_spec.common.prompts import load_prompts
from tests.compiler import needs_compiler
from tests.identity import assert_identical

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
        falcon = ADAPTERS / "smollm2-135m-falcon"
        for strategy in (
            {"spec_strategy": LookupConfig(compile=compile_layers)},
            {"spec_strategy": FalconConfig(compile=compile_layers), "assistant": falcon},
        ):
            call = {**given, **strategy}
            output = model.generate(**call)
            assert_identical(model, call, output, none, tokenizer=tokenizer, baseline="none")
