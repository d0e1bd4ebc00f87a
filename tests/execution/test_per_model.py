"""Things that are made once per model."""

from __future__ import annotations

from hf_spec.execution.per_model import made_once
from tests.tiny_models import build


def test_a_thing_is_made_once_per_model_and_key() -> None:
    first, second = build("llama"), build("qwen2")
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    key = "test_per_model"
    assert [made_once(m, (key, k), make) for m, k in [(first, 1), (first, 1)]] == [0, 0]
    assert made_once(first, (key, 2), make) == 1
    assert made_once(second, (key, 1), make) == 2
    assert len(made) == 3
