"""The command to type next, ready to be copied: with the paths of the one that just ended."""

from __future__ import annotations

import shlex

from hf_spec.cli.options import AUTO


def next_command(*words: object, dtype: str = AUTO, device: str | None = None) -> str:
    """A command of `hf-spec`, quoted for the shell, and dtype and device if not default."""
    given = ["hf-spec", *map(str, words)]
    if dtype != AUTO:
        given += ["--dtype", dtype]
    if device is not None:
        given += ["--device", device]
    return shlex.join(given)


def bench_command(model: object, strategy: str, dtype: str, device: str | None) -> str:
    """The command that measures what has just been trained or calibrated."""
    return next_command("bench", model, "--strategy", strategy, dtype=dtype, device=device)
