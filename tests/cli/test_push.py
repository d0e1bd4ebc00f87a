"""`hf-spec push`: an adapter arrives on a Hub on loopback, or nothing is sent."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from typer.testing import CliRunner

from hf_spec.cli.app import build_app
from tests.adapters.local_hub import LocalHub, closed_port
from tests.adapters.samples import save_sample
from tests.adapters.test_hub import TOKEN, hub  # noqa: F401 - the fixture


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(build_app(), ["push", *map(str, arguments)])


@pytest.fixture
def server(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> LocalHub:  # noqa: F811
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    return hub


def test_an_adapter_arrives(server: LocalHub, tmp_path: Path) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    result = run(folder, "me/head", "--private", "--revision", "next")
    assert result.exit_code == 0, result.output
    repository = server.repositories["me/head"]
    assert repository.private
    head = repository.branches["next"]
    assert result.stdout == f"{server.url}/me/head/commit/{head}\n"
    assert "adapter_model.safetensors" in repository.commits[head]


def test_no_adapter(server: LocalHub, tmp_path: Path) -> None:
    result = run(tmp_path, "me/head")
    assert result.exit_code == 2
    assert str(tmp_path) in result.stderr.replace("\n", "")
    assert "Traceback" not in result.output
    assert server.requests == []


def test_a_hub_that_cannot_be_reached(
    hub: LocalHub,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = save_sample(tmp_path / "head", "falcon")
    monkeypatch.setattr(constants, "ENDPOINT", closed_port())
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("it waits to try again"))
    result = run(folder, "me/head")
    assert result.exit_code == 1
    assert result.stderr.startswith(f"error: the Hub at {constants.ENDPOINT} cannot be reached")
    assert result.stderr.count("\n") == 1
    assert hub.requests == []


def test_no_folder(tmp_path: Path) -> None:
    assert run(tmp_path / "nothing", "me/head").exit_code == 2
