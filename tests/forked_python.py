"""Programs in separate processes that do not import torch and transformers again.

One interpreter imports these and forks for every program. A program imports all other modules
itself, as in a new interpreter, hf_spec above all.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

SERVER = """
import json, os, sys
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationMixin, LlamaForCausalLM
assert not {"hf_spec", "peft"} & set(sys.modules)
for line in sys.stdin:
    program = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in enumerate(program["streams"]):
            os.dup2(os.open(path, os.O_RDWR), stream)
        sys.argv = program["arguments"]
        exec(program["code"], {"__name__": "__main__"})
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Finished:
    """Exit status and output of a program."""

    status: int
    out: str
    err: str


class ForkedPython:
    """Interpreter that forks for each program and runs them one after the other.

    Args:
        python: the interpreter.
        folder: working directory of the programs.
        scratch: folder for files with their output.
        variables: the complete environment.
    """

    def __init__(self, python: str, folder: Path, scratch: Path, variables: Mapping[str, str]):
        self._streams = [scratch / name for name in ("in", "out", "err")]
        self._server = subprocess.Popen(
            [python, "-c", SERVER],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, code: str, *arguments: str) -> Finished:
        """Run a program whose `sys.argv` are the arguments."""
        for path in self._streams:
            path.write_text("")
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        streams = [str(path) for path in self._streams]
        program = {"code": code, "arguments": arguments or ("-c",), "streams": streams}
        self._server.stdin.write(json.dumps(program) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return Finished(status, self._streams[1].read_text(), self._streams[2].read_text())

    def close(self) -> None:
        """End the interpreter."""
        self._server.communicate()
