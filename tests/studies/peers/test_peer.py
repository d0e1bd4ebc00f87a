"""Line protocol with another process, here one that repeats the prompt."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
import torch

from examples.studies.peers.peer import named, started

SCRIPT = """
import json, sys
print(json.dumps({"version": 1}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["new_tokens"] == 99:
        sys.exit(3)
    ids = asked["ids"] + asked["ids"][: asked["new_tokens"]]
    print(json.dumps({"ids": ids, "processor_seconds": 1.5}), flush=True)
"""


@pytest.fixture
def command(tmp_path: Path) -> str:
    script = tmp_path / "echo.py"
    script.write_text(SCRIPT)
    return shlex.join([sys.executable, str(script)])


def test_answers_and_processor_time(command: str) -> None:
    with started("echo", command) as peer:
        assert peer.facts == {"version": 1}
        for _ in range(2):
            run = peer.contender.run(torch.tensor([[5, 6, 7]]), 2)
            assert run.sequence.tolist() == [5, 6, 7, 5, 6]
        assert peer.processor_seconds == 3.0
    assert peer._process.returncode == 0


def test_a_peer_that_ends_is_named(command: str) -> None:
    with started("echo", command) as peer, pytest.raises(SystemExit, match=r"echo .* status 3"):
        peer.run(torch.tensor([[5]]), 99)


def test_option() -> None:
    assert named("a=b --c=d") == ("a", "b --c=d")
    with pytest.raises(ValueError, match="alone"):
        named("alone")
