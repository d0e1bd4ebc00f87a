"""Fixtures: a server in this process on a free port of 127.0.0.1, and a real client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_spec.serving.manager import SpeculativeManager
from hf_spec.serving.settings import ServeSettings
from tests import tiny_models

TEMPLATE = "{% for m in messages %}{{ m['role'] }}{{ m['content'] }}{% endfor %}"

# Maximum wait in seconds.
LIMIT = 60.0


@dataclass(frozen=True)
class Served:
    """A running server: its client, its manager, and its model."""

    client: Any
    manager: SpeculativeManager
    model: str
    url: str
    server: Any

    def ask(self, text: str = "babebi", **given: Any) -> Any:
        """Request a chat completion; the defaults are greedy decoding and 12 tokens."""
        settings = {"temperature": 0, "max_tokens": 12, **given}
        messages = settings.pop("messages", [{"role": "user", "content": text}])
        return self.client.chat.completions.create(model=self.model, messages=messages, **settings)

    def text(self, text: str = "babebi", **given: Any) -> str:
        """Return the whole response text."""
        return str(self.ask(text, **given).choices[0].message.content)

    def metric(self, name: str) -> float:
        """Return a value of `/metrics` by its name without prefix, 0 if it is missing."""
        import httpx2

        for line in httpx2.get(f"{self.url}/metrics").text.splitlines():
            if line.rsplit(" ", 1)[0] == f"hf_spec_{name}":
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def wait(self, done: Callable[[], bool]) -> None:
        """Wait until `done` returns True, at most `LIMIT` seconds."""
        ends = time.monotonic() + LIMIT
        while not done():
            assert time.monotonic() < ends, "not within bounds"
            time.sleep(0.02)


def speller() -> Any:
    """Return a syllable tokenizer with a chat template."""
    tokenizer = tiny_models.speller()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the tiny Llama with the syllable tokenizer."""
    made = tmp_path_factory.mktemp("served") / "model"
    tiny_models.build("llama").save_pretrained(made)
    speller().save_pretrained(made)
    return made


def plain(text: str, new_tokens: int = 12, **settings: Any) -> str:
    """Return the response of plain `generate()` to a chat of one message."""
    tokenizer = speller()
    given = tokenizer(f"user{text}", return_tensors="pt")
    with torch.no_grad():
        output = tiny_models.build("llama").generate(
            given["input_ids"], max_new_tokens=new_tokens, do_sample=False, **settings
        )
    answer = output[0, given["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Served]]:
    """Return a function that starts servers; all are stopped after the test."""
    with starting(folder) as begin:
        yield begin


@contextmanager
def starting(folder: Path) -> Iterator[Callable[..., Served]]:
    """Yield a function that starts servers; all are stopped on exit."""
    pytest.importorskip("fastapi", reason="needs the extra 'serve'")
    openai = pytest.importorskip("openai", reason="needs the extra 'serve'")

    from hf_spec.serving.app import load_app, make_server

    running: list[tuple[Any, threading.Thread, SpeculativeManager]] = []

    def begin(strategy: Any = "lookup", assistant: Any = None, **settings: Any) -> Served:
        manager = SpeculativeManager(strategy, assistant, ServeSettings(port=0, **settings))
        app = load_app(str(folder), manager, device="cpu", dtype="float32")
        server = make_server(app, manager, "127.0.0.1", 0)
        thread = threading.Thread(target=server.run)
        thread.start()
        running.append((server, thread, manager))
        ends = time.monotonic() + LIMIT
        while not server.started:
            assert time.monotonic() < ends, "the server does not start"
            time.sleep(0.02)
        port = server.servers[0].sockets[0].getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT)
        return Served(client, manager, str(folder), url, server)

    yield begin
    for server, thread, manager in running:
        manager.stop()
        server.should_exit = True
        thread.join(LIMIT)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    """Start one server for all tests of a module, with lookup and two sequences at a time.

    It is shared because stopping a server takes a second. Tests compare its counters with
    earlier values.
    """
    with starting(folder) as begin:
        yield begin(max_batch=2)


@pytest.fixture
def fresh(start: Callable[..., Served]) -> Served:
    """Start such a server for one test, which may stop it."""
    return start(max_batch=2)
