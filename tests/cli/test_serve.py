"""`hf-spec serve`: as a process of its own, asked by OpenAI's client, and ended."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.serving.conftest import folder, plain  # noqa: F401 - a fixture

pytest.importorskip("fastapi", reason="needs the extra 'serve'")
pytest.importorskip("openai", reason="needs the extra 'serve'")

import openai

from examples.studies.serving.load import SPECULATIVE, arguments_of, commands, served


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


def test_an_unknown_strategy_is_said_before_anything_is_loaded() -> None:
    result = CliRunner().invoke(build_app(), ["serve", "no/model", "--strategy", "lokup"])
    assert result.exit_code == 2
    assert "lookup" in result.stderr


def test_an_address_that_is_taken_is_a_failure(folder: Path) -> None:  # noqa: F811
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = CliRunner().invoke(build_app(), ["serve", str(folder), "--port", port])
    assert result.exit_code == 1
    assert f"no server can listen at 127.0.0.1, port {port}; choose another" in result.stderr
