"""SmolLM2-135M-Instruct with compiled layers: same tokens as plain `generate()`, up to ties."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_spec
from hf_spec.common.prompts import load_prompts
from tests.identity import difference

pytestmark = [pytest.mark.real, pytest.mark.slow]

ADAPTERS = Path(__file__).parents[2] / "examples" / "adapters"
PROMPTS = load_prompts(per_task=2)
# Rounding can swap two logits (about 20 in size) that are closer than this.
TIE = 1e-3


@pytest.fixture(scope="module")
def compiled(smollm2: Any) -> Iterator[Any]:
    model, tokenizer = smollm2
    report = hf_spec.compile(model)
    assert (report.layers, report.programs, report.refused) == (30, 1, {})
    yield model, tokenizer
    hf_spec.compile(model, "off")


@torch.no_grad()
def is_tie(model: Any, one: Tensor, other: Tensor) -> bool:
    """Return True if the sequences first differ where the two largest logits tie."""
    position = int((one != other).nonzero()[0])
    best = model(one[None, :position]).logits[0, -1].topk(2)
    return {int(one[position]), int(other[position])} == set(best.indices.tolist()) and bool(
        best.values[0] - best.values[1] < TIE
    )


@pytest.mark.parametrize("strategy", ["none", "lookup", "falcon"])
def test_tokens(compiled: Any, strategy: str) -> None:
    model, tokenizer = compiled
    options: dict[str, Any] = {"spec_strategy": strategy}
    if strategy == "falcon":
        options["assistant"] = ADAPTERS / "smollm2-135m-falcon"
    equal = 0
    for prompt in PROMPTS:
        ids = prompt.encode(tokenizer)
        given = {"input_ids": ids, "max_new_tokens": 32, "do_sample": False}
        plain, found = model.generate(**given), model.generate(**given, **options)
        report = difference(model, {**given, **options}, found, plain, tokenizer=tokenizer)
        equal += not report
        assert not report or is_tie(model, plain[0], found[0]), report
    assert equal >= len(PROMPTS) - 1, "ties are rare"
