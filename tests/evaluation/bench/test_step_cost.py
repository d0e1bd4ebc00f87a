"""The cost of a step by number of nodes: every form is timed."""

from __future__ import annotations

from typing import Any

from hf_spec.evaluation.bench.step_cost import measure_step_cost
from tests.model_watch import snapshot

CONTEXT = list(range(3, 23))


def test_every_form_and_count_is_timed(model: Any) -> None:
    before = snapshot(model)
    seconds = measure_step_cost(model, CONTEXT, repeats=1, counts=(1, 2))
    assert seconds.keys() == {"transformers", "off", "auto"}
    for by_count in seconds.values():
        assert by_count.keys() == {1, 2}
        assert all(len(values) == 1 and values[0] > 0 for values in by_count.values())
    assert snapshot(model) == before
