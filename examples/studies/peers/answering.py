"""Server side of `peer`: a process that answers with another library.

It does not import hf_spec, because it runs in the environment of that library.
"""

from __future__ import annotations

import json
import os
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any, TextIO

Answer = Callable[[list[int], int], list[int]]


def add_options(parser: ArgumentParser) -> None:
    """Add the options that every peer has."""
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lookup", action="store_true", help="draft from the prompt")
    # Defaults of OpenVINO's example.
    parser.add_argument("--draft-tokens", type=int, default=5)
    parser.add_argument("--match-length", type=int, default=3)


def run(load: Callable[[Namespace], tuple[dict[str, Any], Answer]], options: Namespace) -> None:
    """Read requests from standard input, and write answers to standard output."""
    # Libraries print to standard output, so redirect it and keep the original for answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    serve(*load(options), sys.stdin, answers)


def serve(
    facts: dict[str, Any],
    answer: Answer,
    requests: TextIO,
    answers: TextIO,
) -> None:
    """Write the facts, then answer each line; `answer` returns the new tokens."""
    print(json.dumps(facts), file=answers, flush=True)
    for line in requests:
        asked = json.loads(line)
        start = time.process_time()
        ids = asked["ids"] + answer(asked["ids"], asked["new_tokens"])
        timed = {"processor_seconds": time.process_time() - start}
        print(json.dumps({"ids": ids, **timed}), file=answers, flush=True)
