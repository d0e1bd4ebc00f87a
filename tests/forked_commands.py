"""Runs commands of an installed package, each in a process that need not import torch again.

One process imports what others wrote, and forks for every command. The package itself is imported
by the fork, as the program `hf-spec` does it.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

SERVER = """
import json, os, sys
import peft, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedModel
for line in sys.stdin:
    command = json.loads(line)
    child = os.fork()
    if not child:
        for stream, path in enumerate(command["streams"]):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), stream)
        sys.argv = ["hf-spec", *command["arguments"]]
        assert "hf_spec" not in sys.modules
        from hf_spec.cli import main
        main()
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class ForkedCommands:
    """`hf-spec` of one environment, started in one folder with one set of variables.

    Args:
        python: the interpreter of the environment.
        folder: where the commands run; their output passes through files in `scratch`.
        variables: the environment, complete.
    """

    def __init__(self, python: Path, folder: Path, scratch: Path, variables: Mapping[str, str]):
        self._output = scratch
        self._server = subprocess.Popen(
            [python, "-c", SERVER],
            cwd=folder,
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, arguments: Sequence[str]) -> tuple[int, str, str]:
        """The status of a command and what it wrote to its two streams."""
        streams = [self._output / name for name in ("in", "out", "err")]
        for path in streams:
            path.write_text("")
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        command = {"arguments": list(arguments), "streams": [str(path) for path in streams]}
        self._server.stdin.write(json.dumps(command) + "\n")
        self._server.stdin.flush()
        status = int(self._server.stdout.readline())
        return status, streams[1].read_text(), streams[2].read_text()

    def close(self) -> None:
        """End the process."""
        self._server.communicate()
