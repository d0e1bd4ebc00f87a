"""Generation with other libraries, each in a separate process and environment.

A peer is a command, such as `openvino_peer`. It first writes a line of JSON with facts about
itself. Then it reads a line `{"ids": [...], "new_tokens": 48}` at a time and answers with
`{"ids": [...], "processor_seconds": 0.9}`: the ids of prompt and answer, and the processor seconds.
It exits at the end of its input.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hf_spec.evaluation.bench.contenders import Contender, Run


class Peer:
    """A running peer.

    Attributes:
        facts: its first line, such as versions and options.
        processor_seconds: processor time of its process for all answers so far.
    """

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        """Wait for the first line of the process."""
        self.name = name
        self._process = process
        self.facts = self._read()
        self.processor_seconds = 0.0

    def run(self, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        """Generate greedily from (1, L) ids without padding."""
        assert self._process.stdin is not None
        asked = {"ids": ids[0].tolist(), "new_tokens": new_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._read()
        self.processor_seconds += answer["processor_seconds"]
        return Run(torch.tensor([answer["ids"]]))

    @property
    def contender(self) -> Contender:
        """The peer as a contender of the benchmarks."""
        return Contender(self.name, self.run, batches=False)

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} has ended, with status {self._process.wait()}")
        found: dict[str, Any] = json.loads(line)
        return found


@contextmanager
def started(name: str, command: str) -> Iterator[Peer]:
    """Start a peer that exits with the context."""
    with subprocess.Popen(
        shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        # On exit, Popen closes the input and waits for the process.
        yield Peer(name, process)


def named(text: str) -> tuple[str, str]:
    """Parse NAME=COMMAND of an option."""
    name, found, command = text.partition("=")
    if not found:
        raise ValueError(text)
    return name, command
