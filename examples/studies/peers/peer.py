"""Generators of other libraries, each in a process and an environment of its own.

A peer is a command. It first writes a line of JSON with facts about itself; then it reads a line
`{"ids": [...], "new_tokens": 48}` at a time and answers with
`{"ids": [...], "processor_seconds": 0.9}`: prompt and answer, and what its process computed.
It ends when its input ends. `openvino_peer` is one.
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
        facts: what it says about itself.
        processor_seconds: what its process has computed so far for all answers.
    """

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        """Wait until it can answer."""
        self.name = name
        self._process = process
        self.facts = self._read()
        self.processor_seconds = 0.0

    def run(self, ids: Tensor, new_tokens: int, mask: Tensor | None = None) -> Run:
        """Greedy, from (1, L) ids that all count."""
        assert self._process.stdin is not None
        asked = {"ids": ids[0].tolist(), "new_tokens": new_tokens}
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        answer = self._read()
        self.processor_seconds += answer["processor_seconds"]
        return Run(torch.tensor([answer["ids"]]))

    @property
    def contender(self) -> Contender:
        """As the benchmarks know it."""
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
    """A peer that ends with the context."""
    with subprocess.Popen(
        shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        # Leaving closes its input, and waits.
        yield Peer(name, process)


def named(text: str) -> tuple[str, str]:
    """NAME=COMMAND, as an option gives it."""
    name, found, command = text.partition("=")
    if not found:
        raise ValueError(text)
    return name, command
