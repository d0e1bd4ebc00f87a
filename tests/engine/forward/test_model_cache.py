"""Values that are computed once per model."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from hf_spec.engine.forward.model_cache import cached_per_model
from tests.tiny_models import build


def test_a_thing_is_made_once_per_model_and_key() -> None:
    first, second = build("llama"), build("qwen2")
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    key = "test_per_model"
    assert [cached_per_model(m, (key, k), make) for m, k in [(first, 1), (first, 1)]] == [0, 0]
    assert cached_per_model(first, (key, 2), make) == 1
    assert cached_per_model(second, (key, 1), make) == 2
    assert len(made) == 3


def test_threads_that_ask_at_once_get_the_same() -> None:
    """The first thread computes the value while the others wait."""
    model, begun, made = build("llama"), threading.Barrier(4), []

    def make() -> object:
        made.append(threading.get_ident())
        time.sleep(0.05)
        return object()

    def ask() -> object:
        begun.wait()
        return cached_per_model(model, "asked by threads", make)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: ask(), range(4)))
    assert len(made) == 1
    assert len(set(map(id, found))) == 1


def test_making_one_value_may_need_another() -> None:
    model = build("llama")
    inner = partial(cached_per_model, model, "inner value", lambda: 3)
    assert cached_per_model(model, "outer value", lambda: inner() + 1) == 4
