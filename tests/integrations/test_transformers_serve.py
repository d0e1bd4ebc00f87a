"""`transformers serve`, in a process that imports hf_spec, uses a stored strategy."""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from hf_spec import LookupConfig, SpecStats, collect_stats
from tests import tiny_models
from tests.serving.conftest import LIMIT, plain, speller

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai
from transformers.cli.serve import Serve

TEXTS = ["babebi", "cacecacece", "dadedadede"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Save the tiny Llama with a strategy in its `generation_config.json`."""
    model: Any = copy.deepcopy(tiny_models.build("llama"))
    model.generation_config.spec_strategy = LookupConfig(max_draft_tokens=3).to_dict()
    model.save_pretrained(tmp_path)
    speller().save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def served(folder: Path) -> Iterator[Serve]:
    """Start the command's `Serve` class as the tests of transformers do."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = Serve(
        force_model=str(folder),
        device="cpu",
        dtype="float32",
        host="127.0.0.1",
        port=port,
        non_blocking=True,
    )
    ends = time.monotonic() + LIMIT
    while not server.server.started:
        assert time.monotonic() < ends, "the server does not start"
        time.sleep(0.02)
    yield server
    server.kill_server()


def test_it_follows_a_stored_strategy_and_answers_as_plain(folder: Path, served: Serve) -> None:
    [loaded] = served._model_manager.loaded_models.values()
    found: list[SpecStats] = []
    loaded.model.generate = partial(_watched, loaded.model.generate, found)
    url = f"http://127.0.0.1:{served.server.config.port}/v1"
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=LIMIT)
    for text in TEXTS:
        given: dict[str, Any] = {"model": str(folder), "temperature": 0, "max_tokens": 12}
        given["messages"] = [{"role": "user", "content": text}]
        whole = client.chat.completions.create(**given)
        chunks = client.chat.completions.create(**given, stream=True)
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.choices[0].message.content == streamed == plain(text)
    assert len(found) == 2 * len(TEXTS)
    assert sum(found, SpecStats([])).drafted_tokens > 0


def _watched(generate: Callable[..., Any], found: list[SpecStats], *args: Any, **given: Any) -> Any:
    # Statistics are collected per thread, and the server generates in its own thread.
    with collect_stats() as stats:
        output = generate(*args, **given)
    found += stats
    return output
