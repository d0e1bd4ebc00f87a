"""Validation of the evaluation settings."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import OptionError
from hf_spec.evaluation.settings import (
    CalibrationSettings,
    SamplingPlan,
    Suite,
    TreeSettings,
    VerificationPlan,
)


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        (CalibrationSettings, {"thresholds": ()}),
        (CalibrationSettings, {"thresholds": (0.5, 1.5)}),
        (CalibrationSettings, {"longest": ()}),
        (CalibrationSettings, {"static_lengths": ()}),
        (CalibrationSettings, {"repeats": 0}),
        (CalibrationSettings, {"new_tokens": 0}),
        (CalibrationSettings, {"reference": 0}),
        (TreeSettings, {"depth": 0}),
        (TreeSettings, {"num_ranks": 0}),
        (TreeSettings, {"max_nodes": 0}),
        (TreeSettings, {"new_tokens": 1}),
        (TreeSettings, {"repeats": 0}),
        (TreeSettings, {"generations": 0}),
        (TreeSettings, {"drafted_nodes": (0,)}),
        (TreeSettings, {"node_counts": (0, 3)}),
    ],
)
def test_wrong_values(settings: Any, options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        settings(**options)


@pytest.mark.parametrize("name", ["temperature", "top_k", "top_p"])
def test_sampling_options_need_sampling(name: str) -> None:
    option = name.replace("_", "-")
    with pytest.raises(OptionError, match=f"--{option} 1 needs --do-sample"):
        Suite(**{name: 1})
    assert getattr(Suite(sample=True, **{name: 1}), name) == 1


def test_ways_are_counted() -> None:
    assert CalibrationSettings((0.1, 0.2), (3, 4, 5), (1,)).num_contenders == 1 + 2 * 3 + 1


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
