"""`auto` with the adapters shipped for SmolLM2: identical tokens in fewer forward passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_spec import AutoConfig
from hf_spec.common.prompts import load_prompts
from hf_spec.evaluation.lossless.verify import verify
from hf_spec.evaluation.settings import SamplingPlan, VerificationPlan
from hf_spec.methods.entries import Entry
from tests.identity import assert_identical
from tests.tiny_models import left_padded

pytestmark = [pytest.mark.real, pytest.mark.full]

NEW_TOKENS = 24
PROMPTS = load_prompts(per_task=1)
ADAPTERS = [
    str(Path(__file__).parents[2] / "examples" / "adapters" / f"smollm2-135m-{name}")
    for name in ("falcon", "draft")
]
# Measured on two cores with AVX-512.
TIMINGS = {
    "verify": [[1, 0.028], [8, 0.034], [16, 0.038], [32, 0.052]],
    "draft": {"falcon": [[1, 0.003], [4, 0.008]], "tree": [[1, 0.0035], [5, 0.018]]},
}
SUBJECT = Entry("auto", AutoConfig(timings=TIMINGS), ADAPTERS)


def test_it_proves_itself(smollm2: Any) -> None:
    sampling = SamplingPlan(draws=100, rows=50)
    plan = VerificationPlan(NEW_TOKENS, 1, sampling)
    (found,) = verify(*smollm2, PROMPTS, [SUBJECT], plan)
    assert found.passed, found
    assert not any(output.differences for output in found.greedy)
    # Tau is 1.0 and 0.8 with each of these adapters alone, and 1.1 with lookup.
    assert sum(output.tau for output in found.greedy) / len(PROMPTS) > 1.3


def test_a_ragged_batch_with_timings_of_this_machine(smollm2: Any) -> None:
    model, tokenizer = smollm2
    inputs = left_padded([prompt.encode(tokenizer)[0] for prompt in PROMPTS[:3]])
    options: dict[str, Any] = {**inputs, "max_new_tokens": 16, "do_sample": False}
    expected = model.generate(**options)
    call = {**options, "spec_strategy": "auto", "assistant": ADAPTERS}
    assert_identical(model, call, model.generate(**call), expected, tokenizer=tokenizer)
