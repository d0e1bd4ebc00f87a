"""The first minutes on a GPU: what runs, whether it is right, what a round costs, and where.

Run from a checkout as `python -m examples.studies.gpu.first_light --help` says. No network and no
installation beyond the package with its tests. Every part is a process with a time limit, and none
stops the others; results are JSON files and a log in one folder. `--dry-run` tries everything out
on a CPU in small.
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

MEASURED = [sys.executable, "-m", "examples.studies.gpu.rounds"]
PROMPTS = (
    "Count the words of this line, then say them in reverse order, twice.",
    "Copy this text word by word and put a comma after every word of it.",
)


@dataclass(frozen=True)
class Part:
    """A command that must end within some seconds; of `environment` what it adds."""

    name: str
    seconds: int
    command: Sequence[str]
    environment: tuple[tuple[str, str], ...] = ()


def parts(out: Path, model: Path, dry: bool) -> list[Part]:
    """What is run, in this order: right before fast, and what matters most first."""
    python, small = sys.executable, ["--dry-run"] if dry else []
    device, dtype = ("cpu", "float32") if dry else ("cuda", "bfloat16")
    there = ["--device", device, "--dtype", dtype]
    tests = ["tests/kernels"] if dry else ["tests"]
    tests += ["--collect-only"] if dry else ["--junitxml", str(out / "tests.xml")]
    # Trees are drafted by a part of the model itself; other drafts are right as often as told.
    bench = ["--strategy", "none", "--strategy", "lookup", "--strategy", "tree@truncated:2"]
    bench += ["--no-baselines", "--synthetic-acceptance", "0.8", "--profile"]
    bench += ["--prompts", str(out / "prompts.txt"), "--out", str(out / "bench.json")]
    sizes = ["--nodes", "1", "8", "32", "--contexts", "512", "8192", "--repeats", "30"]
    if dry:
        bench += ["--max-new-tokens", "16", "--repeats", "1"]
        sizes = ["--nodes", "1", "4", "--contexts", "64", "--repeats", "2", "--heads", "4"]
        sizes += ["--kv-heads", "2", "--head-size", "32"]
    else:
        bench += ["--max-new-tokens", "128", "--batch-size", "1", "--batch-size", "2"]
        bench += ["--compiled"]
    attention = [python, "-m", "examples.studies.kernels.tree_attention", *sizes, *there]
    interpreted = (("TRITON_INTERPRET", "1"),) if dry else ()
    return [
        Part("facts", 60, [*MEASURED, "facts", *small, "--out", str(out / "facts.json")]),
        Part("tests", 600, [python, "-m", "pytest", "-q", "-m", "gpu", *tests]),
        Part("fallback", 60, [*MEASURED, "fallback", *small, "--out", str(out / "fallback.json")]),
        Part("rounds", 300, [*MEASURED, "rounds", *small, "--out", str(out / "rounds.json")]),
        Part("folder", 60, [*MEASURED, "folder", *small, "--out", str(model)]),
        Part("bench", 300, [python, "-m", "hf_spec", "bench", str(model), *there, *bench]),
        Part("kernels", 200, [*attention, "--out", str(out / "kernels.json")], interpreted),
    ]


def run(part: Part, log: Path) -> dict[str, object]:
    """How a part ended: its status, or none where its time was over, and its seconds."""
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
            print("== its time is over", file=lines)
    return {"status": status, "seconds": time.perf_counter() - start}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; says how every part ended and writes it as JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.studies.gpu.first_light", description=__doc__
    )
    parser.add_argument("--out", type=Path, default=Path("first_light"), help="folder of results")
    parser.add_argument(
        "--model", type=Path, help="checkpoint for the benchmark; random by default"
    )
    parser.add_argument("--part", action="append", help="only these; may be repeated")
    parser.add_argument("--dry-run", action="store_true", help="small, on a CPU")
    options = parser.parse_args(argv)
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("there is no GPU here; --dry-run tries everything out on a CPU")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "prompts.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf-8")
    planned = parts(options.out, options.model or options.out / "model", options.dry_run)
    # A checkpoint of one's own needs no other.
    planned = [part for part in planned if part.name != "folder" or options.model is None]
    names = [part.name for part in planned]
    if unknown := set(options.part or []) - set(names):
        parser.error(f"--part {', '.join(sorted(unknown))}; choose {', '.join(names)}")
    found = {}
    for part in planned:
        if not options.part or part.name in options.part:
            found[part.name] = run(part, options.out / "log.txt")
            print(part.name, *found[part.name].values())
            write_json(options.out / "parts.json", found)


if __name__ == "__main__":
    main()
