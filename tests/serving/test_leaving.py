"""Clients that disconnect, and servers that shut down."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serving.conftest import Served, plain

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai

from hf_spec.serving import app

MESSAGES = [{"role": "user", "content": "babebi"}]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slow down the decoding steps, so that responses take long."""
    from hf_spec.engine.decode.continuous_batching import OpenBatch

    step = OpenBatch.step

    def slowly(self: Any) -> Any:
        time.sleep(0.05)
        return step(self)

    monkeypatch.setattr(OpenBatch, "step", slowly)


class TestAClientThatLeaves:
    @pytest.mark.by_default(path=("chat/completions",))
    @pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
    def test_frees_its_slot_where_the_answer_is_not_streamed(
        self, served: Served, slow: None, path: str
    ) -> None:
        key = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "baba"}}
        given = {**body.get(path, {"input": "baba"}), key: 250, "stream": False}
        cancelled = 'requests_total{outcome="cancelled"}'
        before, generated = served.metric(cancelled), served.metric("generated_tokens_total")
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(f"{served.url}/v1/{path}", json=given, timeout=0.5)
        served.wait(lambda: served.metric(cancelled) == before + 1)
        served.wait(lambda: served.metric("running") == 0)
        assert served.metric("generated_tokens_total") < generated + 240

    @pytest.mark.full
    def test_is_missed_while_it_waits(self, start: Callable[..., Served], slow: None) -> None:
        served = start(max_batch=1)
        first = served.ask("babebi", max_tokens=60, stream=True)
        served.wait(lambda: served.metric("running") == 1)
        with pytest.raises(httpx2.TimeoutException):
            httpx2.post(
                f"{served.url}/v1/chat/completions", json={"messages": MESSAGES}, timeout=0.3
            )
        served.wait(lambda: served.metric("queue_length") == 0)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in first)
        assert text == plain("babebi", 60)

    def test_in_the_middle_of_its_body(self, served: Served) -> None:
        host, _, port = served.url.removeprefix("http://").partition(":")
        for _ in range(3):
            with socket.create_connection((host, int(port))) as half:
                half.sendall(
                    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
                    b"Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{"
                )
        assert served.text() == plain("babebi")


class TestTheEnd:
    @pytest.mark.full
    def test_answers_that_go_on_are_completed(self, fresh: Served, slow: None) -> None:
        stream = fresh.ask("babebi", max_tokens=40, stream=True)
        pieces = [next(iter(stream))]
        fresh.server.should_exit = True
        pieces += list(stream)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == plain("babebi", 40)
        assert pieces[-1].choices[0].finish_reason == "length"

    @pytest.mark.by_default(path=("chat/completions",))
    @pytest.mark.parametrize("path", ["chat/completions", "completions", "responses"])
    def test_a_stream_that_takes_too_long_ends_with_an_error(
        self, fresh: Served, slow: None, monkeypatch: pytest.MonkeyPatch, path: str
    ) -> None:
        monkeypatch.setattr(app, "DRAIN_SECONDS", 0.5)
        body = {"chat/completions": {"messages": MESSAGES}, "completions": {"prompt": "baba"}}
        given = {"stream": True, "max_tokens": 250, **body.get(path, {})}
        if path == "responses":
            given = {"input": "baba", "max_output_tokens": 250, "stream": True}
        lines: list[str] = []
        with httpx2.stream("POST", f"{fresh.url}/v1/{path}", json=given) as response:
            for line in response.iter_lines():
                lines += [line] if line else []
                fresh.server.should_exit = True
        assert "error" in lines[-1]
        assert "the server is stopping" in " ".join(lines)
        assert '"finish_reason":"' not in " ".join(lines)
        assert "response.completed" not in " ".join(lines)

    def test_an_answer_that_takes_too_long_is_an_error(
        self, fresh: Served, slow: None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(app, "DRAIN_SECONDS", 0.5)
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(fresh.ask, "babebi", max_tokens=250)
            fresh.wait(lambda: fresh.metric("running") == 1)
            fresh.server.should_exit = True
            with pytest.raises(openai.InternalServerError, match="503 - the server is stopping"):
                asked.result()


@pytest.mark.full
def test_a_stream_beside_many_that_leave(start: Callable[..., Served]) -> None:
    served = start(max_batch=4)
    stop = threading.Event()

    def leave() -> None:
        while not stop.is_set():
            stream = served.ask("cacedo", max_tokens=200, stream=True)
            next(iter(stream))
            stream.close()

    with ThreadPoolExecutor(3) as pool:
        leaving = [pool.submit(leave) for _ in range(3)]
        found = [served.text("babebi", max_tokens=100) for _ in range(5)]
        stop.set()
        for one in leaving:
            one.result()
    assert found == [plain("babebi", 100)] * 5
