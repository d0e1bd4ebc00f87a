"""Handlers: parsing outside the event loop, client errors as status 400, and the single model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from hf_spec.serving.errors import RequestError, StoppedError
from tests.serving.conftest import Served

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2

from hf_spec.serving.handlers import ServedModel, content_errors_as_400
from tests.serving.test_checks import post


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError("role"), "KeyError: 'role'"),
        (ValueError("too long"), "too long"),
        (RecursionError("too deep"), "RecursionError: too deep"),
        (OverflowError("too large"), "OverflowError: too large"),
        (RuntimeError("Could not infer dtype"), "RuntimeError: Could not infer dtype"),
    ],
)
def test_errors_about_contents_are_the_clients(error: Exception, message: str) -> None:
    with pytest.raises(RequestError) as caught, content_errors_as_400():
        raise error
    assert caught.value.status == 400
    assert str(caught.value) == message


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("full"), MemoryError(), OSError(), StoppedError()]
)
def test_others_are_not(error: Exception) -> None:
    with pytest.raises(type(error)) as caught, content_errors_as_400():
        raise error
    assert caught.value is error


def test_no_other_model_is_loaded(folder: Path, tmp_path: Path) -> None:
    model = ServedModel(str(folder), device="cpu", dtype="float32")
    key = model.process_model_name(str(folder))
    assert len(model.load_model_and_processor(key)) == 2
    for other in (str(tmp_path), str(folder.parent), f"{folder}@dev"):
        with pytest.raises(RequestError, match="does not exist"):
            model.load_model_and_processor(model.process_model_name(other))
    with pytest.raises(RequestError, match="does not exist"):
        model.load_model_and_processor(key, gguf_file="other.gguf")
    assert list(model.loaded_models) == [key]
    assert model.description["owned_by"] == "local"


@pytest.mark.full
def test_health_answers_while_requests_are_read(start: Callable[..., Served]) -> None:
    """The requests have slow chat templates, or prompts and stop strings of maximum size."""
    served = start(client_templates=True, max_stop=500)
    slow = "{% for a in range(1500) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    bodies = [{"chat_template_kwargs": {"chat_template": slow + "user"}}] * 4
    bodies += [{"messages": [{"role": "user", "content": "ba" * 500_000}]}] * 2
    bodies += [{"stop": [f"{number:05}" * 8 for number in range(500)]}] * 2
    stop, slowest = threading.Event(), 0.0

    def watch() -> None:
        nonlocal slowest
        with httpx2.Client(timeout=30) as client:
            while not stop.is_set():
                began = time.perf_counter()
                assert client.get(f"{served.url}/health").status_code == 200
                slowest = max(slowest, time.perf_counter() - began)
                time.sleep(0.02)

    watching = threading.Thread(target=watch)
    watching.start()
    began = time.perf_counter()
    with ThreadPoolExecutor(8) as pool:
        statuses = [r.status_code for r in pool.map(lambda body: post(served, body), bodies)]
    took = time.perf_counter() - began
    stop.set()
    watching.join()
    assert set(statuses) <= {200, 400}
    assert took > 1, "reading takes long enough to be noticed"
    assert slowest < 1, slowest
