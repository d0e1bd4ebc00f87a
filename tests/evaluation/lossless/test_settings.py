"""The plan of a verification is checked before anything runs."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.evaluation.lossless.settings import SamplingPlan, VerificationPlan


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (SamplingPlan, {"draws": 19}),
        (SamplingPlan, {"temperature": 0.0}),
        (SamplingPlan, {"significance": 2}),
        (VerificationPlan, {"new_tokens": 0}),
        (VerificationPlan, {"sampled_prompts": -1}),
    ],
)
def test_values_that_prove_nothing(kind: Any, values: dict[str, Any]) -> None:
    [name] = values
    with pytest.raises(OptionError, match=f"{name}=.* must be"):
        kind(**values)


def test_samples_are_of_the_whole_distribution() -> None:
    options = SamplingPlan(temperature=0.5).options
    assert options == {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1.0}
