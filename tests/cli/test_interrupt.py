"""Ctrl-C in real processes: status 130, no traceback, and no partial files."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import AutoConfig

from tests.cli.train.cli_files import run, save_model, save_responses

PATIENCE = 300  # seconds; importing torch is slow on a busy machine


def start(*arguments: Any, **streams: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "hf_spec", *map(str, arguments)]
    # A child process inherits an ignored SIGINT, for example from a shell's background job.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, stderr=subprocess.PIPE, start_new_session=True, **streams)
    finally:
        signal.signal(signal.SIGINT, before)


def wait_for(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + PATIENCE
    while not ready():
        assert process.poll() is None, "the process ended too early"
        assert time.monotonic() < end
        time.sleep(0.02)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Send SIGINT and check that the command exits with status 130 and no traceback."""
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130, error.decode()
    assert b"Traceback" not in error


@pytest.mark.full
def test_train(tmp_path: Path) -> None:
    model = save_model(tmp_path / "model")
    responses = save_responses(tmp_path / "responses.jsonl")
    out = tmp_path / "adapter"
    where = (model, "--responses", responses, "--out", out)
    small = (
        "--mode",
        "embeddings",
        "--batch-tokens",
        20,
        "--num-train-epochs",
        40,
        "--dtype",
        "float32",
    )
    command = ("train", "sdsat", *where, *small)
    process = start(*command)
    checkpoint = out / "training" / "checkpoint.safetensors"
    wait_for(checkpoint.exists, process)
    interrupt(process)
    assert load_file(checkpoint)
    metrics = (out / "training" / "metrics.jsonl").read_text()
    assert len([json.loads(line) for line in metrics.splitlines()]) >= 100
    assert not list(tmp_path.rglob("*.part"))
    assert not (out / "adapter_model.safetensors").exists()
    # The same command resumes from the checkpoint.
    result = run(*command)
    assert result.exit_code == 0, result.output
    starts = json.loads((out / "training" / "run.json").read_text())["starts"]
    assert [entry["step"] >= 100 for entry in starts] == [False, True]
    assert starts[0]["options"]["mode"] == "embeddings"
    assert starts[0]["options"]["out"] == str(out)
    assert "train sdsat " in starts[0]["command"]
    assert (out / "adapter_model.safetensors").exists()


@pytest.mark.full
def test_generate(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    # Allow a text that is too long to end before Ctrl-C.
    config = AutoConfig.from_pretrained(folder)
    config.max_position_embeddings = 100_000
    config.save_pretrained(folder)
    terminal, end = pty.openpty()
    process = start(
        *("generate", folder, "ba", "--raw", "--strategy", "none", "--max-new-tokens", 50_000),
        stdout=end,
    )
    os.close(end)
    try:
        # Wait for the first text on the terminal.
        assert os.read(terminal, 1)
        interrupt(process)
    finally:
        os.close(terminal)
