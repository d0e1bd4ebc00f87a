"""`hf-spec serve` as a separate process: requests of the OpenAI client, and shutdown."""

from __future__ import annotations

import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.serving.conftest import folder, plain  # noqa: F401 - a fixture

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import httpx2
import openai

from examples.studies.serving.load import SPECULATIVE, arguments_of, commands, served


@pytest.mark.full
@pytest.mark.smoke
def test_it_serves_until_it_is_told_to_stop(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    given = arguments_of(["--model", str(folder), "--strategy", "lookup", "--out", "unused"])
    log = tmp_path / "log"
    with served(SPECULATIVE, commands(given)[SPECULATIVE], log) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=60)
        answer = client.chat.completions.create(
            model=str(folder),
            messages=[{"role": "user", "content": "babebi"}],
            max_tokens=12,
            temperature=0,
        )
        assert answer.choices[0].message.content == plain("babebi")
        assert server.metrics()["hf_spec_generated_tokens_total"] == 12
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(timeout=60)
    assert f"{folder} with strategy lookup at http://127.0.0.1:" in log.read_text()


@pytest.mark.full
def test_it_ends_within_ten_seconds_whatever_it_does(folder: Path, tmp_path: Path) -> None:  # noqa: F811
    """Stop during a request, a partial request, and chat templates that run for minutes."""
    given = arguments_of(["--model", str(folder), "--strategy", "lookup", "--out", "unused"])
    command = [*commands(given)[SPECULATIVE], "--trust-request-chat-template"]
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with served(SPECULATIVE, command, tmp_path / "log") as server, ThreadPoolExecutor(6) as pool:
        host, _, port = server.url.removeprefix("http://").partition(":")
        asked = {"messages": [{"role": "user", "content": "babebi"}]}
        slow = {**asked, "chat_template_kwargs": {"chat_template": endless}}
        url = f"{server.url}/v1/chat/completions"
        for body in (slow, slow, asked):
            pool.submit(httpx2.post, url, json=body, timeout=60)
        with socket.create_connection((host, int(port))) as half:
            half.sendall(b"POST /v1/completions HTTP/1.1\r\nContent-Length: 9\r\n")
            began = time.monotonic()
            # The templates share the interpreter with the event loop.
            assert httpx2.get(f"{server.url}/health", timeout=30).status_code == 200
            assert time.monotonic() - began < 1
            began = time.monotonic()
            server.process.send_signal(signal.SIGTERM)
            server.process.wait(timeout=30)
            assert time.monotonic() - began < 10


def test_the_key_may_be_in_the_environment(
    folder: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = []

    def make(app: Any, manager: Any, host: str, port: int) -> Any:
        keys.append(manager.settings.api_key)
        return SimpleNamespace(run=lambda: None)

    monkeypatch.setattr("hf_spec.serving.app.make_server", make)
    monkeypatch.setenv("HF_SPEC_API_KEY", "of the environment")
    open_to_all = [str(folder), "--host", "0.0.0.0"]
    for options in (open_to_all, [str(folder), "--api-key", "given"]):
        assert CliRunner().invoke(build_app(), ["serve", *options]).exit_code == 0
    monkeypatch.delenv("HF_SPEC_API_KEY")
    warned = CliRunner().invoke(build_app(), ["serve", *open_to_all])
    assert keys == ["of the environment", "given", None]
    assert "set --api-key" in warned.stderr


def test_an_unknown_strategy_is_said_before_anything_is_loaded() -> None:
    result = CliRunner().invoke(build_app(), ["serve", "no/model", "--strategy", "lokup"])
    assert result.exit_code == 2
    assert "lookup" in result.stderr


def test_an_address_that_is_taken_is_a_failure(folder: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(build_app(), ["serve", str(folder), "--port", port])
    assert result.exit_code == 1
    assert f"cannot listen on 127.0.0.1, port {port}; choose another" in result.stderr
