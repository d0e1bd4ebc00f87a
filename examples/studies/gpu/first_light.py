"""First checks on a GPU: correctness of the output, and costs of rounds and kernels.

Run from a checkout; see `python -m examples.studies.gpu.first_light --help`. It needs no network,
only the package with its tests. Every part is a process with a time limit, and a failure does not
stop the other parts. The parts form three groups of at most ten minutes each; `--group` runs a
single one if the GPU is available for no longer. Results are JSON files and a log in one folder.
`--dry-run` tries everything out on a CPU with small sizes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_spec.common.files import write_json

PYTEST = [sys.executable, "-m", "pytest", "-q"]
ROUNDS = [sys.executable, "-m", "examples.studies.gpu.rounds"]
ATTENTION = [sys.executable, "-m", "examples.studies.kernels.tree_attention"]
# Tests that run all architectures and strategies on the device in HF_SPEC_TEST_DEVICE.
IDENTITY = ["tests/test_identity.py", "tests/test_batches.py"]


@dataclass(frozen=True)
class Part:
    """A command with a time limit in seconds and additional environment variables."""

    name: str
    seconds: int
    command: Sequence[str]
    environment: tuple[tuple[str, str], ...] = ()


def groups(out: Path, dry: bool) -> dict[str, list[Part]]:
    """Return the parts of each group, in the order in which they run.

    Groups take at most ten minutes each, and measurements that may run out of time come last.
    """
    small = ["--dry-run"] if dry else []
    device, dtype = ("cpu", "float32") if dry else ("cuda", "bfloat16")
    folder = "tests/kernels" if dry else "tests"
    sizes = ["--nodes", "1", "8", "32", "--contexts", "512", "8192", "--repeats", "30"]
    models = ["--model", "llama-3.1-8b", "--model", "smollm2-135m", "--batch-size", "1"]
    if dry:
        models = []
        sizes = ["--nodes", "1", "4", "--contexts", "64", "--repeats", "2", "--heads", "4"]
        sizes += ["--kv-heads", "2", "--head-size", "32"]

    def report(name: str) -> list[str]:
        return ["--collect-only"] if dry else ["--junitxml", str(out / f"{name}.xml")]

    def result(name: str) -> list[str]:
        return ["--out", str(out / f"{name}.json")]

    return {
        "correct": [
            Part("facts", 40, [*ROUNDS, "facts", *small, *result("facts")]),
            Part("fallback", 40, [*ROUNDS, "fallback", *small, *result("fallback")]),
            Part("tests", 340, [*PYTEST, "-m", "gpu", folder, *report("tests")]),
            Part(
                "identity",
                170,
                [*PYTEST, *IDENTITY, *report("identity")],
                (("HF_SPEC_TEST_DEVICE", device),),
            ),
        ],
        "rounds": [Part("rounds", 590, [*ROUNDS, "rounds", *small, *models, *result("rounds")])],
        "kernels": [
            Part(
                "kernels",
                200,
                [*ATTENTION, *sizes, "--device", device, "--dtype", dtype, *result("kernels")],
                (("TRITON_INTERPRET", "1"),) if dry else (),
            )
        ],
    }


def run(part: Part, log: Path) -> dict[str, object]:
    """Run a part; return its exit status, None after the time limit, and its seconds."""
    start, status = time.perf_counter(), None
    path = [str(Path.cwd()), str(Path.cwd() / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}
    environment |= {"HF_HUB_OFFLINE": "1", **dict(part.environment)}
    with log.open("a", encoding="utf-8") as lines:
        print("==", part.name, *part.command, file=lines, flush=True)
        try:
            status = subprocess.run(
                part.command,
                stdout=lines,
                stderr=subprocess.STDOUT,
                env=environment,
                timeout=part.seconds,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            print("== time limit", file=lines)
    return {"status": status, "seconds": time.perf_counter() - start}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the parts, print the status of each, and write it as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.first_light", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("first_light"), help="folder of results")
    parser.add_argument(
        "--group",
        action="append",
        choices=("correct", "rounds", "kernels"),
        help="at most ten minutes each; default: all",
    )
    parser.add_argument("--dry-run", action="store_true", help="small sizes on a CPU")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU found; --dry-run tries everything out on a CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    found = {}
    for group, parts in groups(options.out, options.dry_run).items():
        for part in parts if group in (options.group or [group]) else []:
            found[part.name] = run(part, options.out / "log.txt")
            print(part.name, *found[part.name].values(), flush=True)
            write_json(options.out / "parts.json", found)


if __name__ == "__main__":
    main()
