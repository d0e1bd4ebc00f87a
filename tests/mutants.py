"""Plant mistakes in the code, one at a time, and check that the tests catch each of them.

Usage: python -m tests.mutants [TEXT ...] [--jobs N] [--list] [--out FILE]

Each mistake is a wrong formula or a forgotten case that a developer could write. Tools such
as mutmut and cosmic-ray change operators all over a file, which yields thousands of unlikely
mistakes, so they do not fit. A mistake counts as caught if one of its listed tests fails. A syntax
error, an import error or an error in a fixture does not count. If the tests of the default
selection pass, all tests of their files run, including those of the full tier.

This is a program to run by hand, not a test. It works on copies of the tracked files.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests.forked_python import Finished, ForkedPython
from tests.planted import drafting, engine, four_bit, kernels, methods, training_and_serving
from tests.planted.mutant import Mutant

ROOT = Path(__file__).parents[1]
MUTANTS = (
    *engine.MUTANTS,
    *drafting.MUTANTS,
    *methods.MUTANTS,
    *kernels.MUTANTS,
    *four_bit.MUTANTS,
    *training_and_serving.MUTANTS,
)
# Largest share of the mistakes that only the full tier may catch.
FULL_SHARE = 0.1
# Timeout of a run in seconds.
LONGEST_RUN = 900
CODE = f"import pytest, signal, sys; signal.alarm({LONGEST_RUN}); sys.exit(pytest.main(sys.argv))"
# Exit statuses of pytest.
PASSED, FAILED, NO_TESTS = 0, 1, 5
# Errors of code that does not run at all.
BROKEN = ("SyntaxError", "IndentationError", "ImportError", "ModuleNotFoundError", "NameError")


@dataclass(frozen=True)
class Outcome:
    """Result of the tests of a mistake.

    Attributes:
        caught_by: node id of the test that failed; empty if none did.
        tier: "default" or "full".
        output: output of the last run.
    """

    mutant: Mutant
    caught_by: str
    tier: str
    output: str


class Tree:
    """Copy of the tracked files, in which tests run."""

    def __init__(self, folder: Path, cache: Path):
        self.folder = folder
        copy_tracked_files(folder)
        scratch = folder.with_name(f"{folder.name}-streams")
        scratch.mkdir()
        variables = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "kernels")]),
            # Libraries of changed C++ files are deleted with the copy.
            "HF_SPEC_CACHE": os.environ.get("HF_SPEC_CACHE", str(cache)),
            # Always on the CPU; the interpreter must be enabled before Triton is imported.
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_INTERPRET": "1",
            # Pytest truncates the reasons of failures to the width of the terminal.
            "COLUMNS": "1000",
        }
        self._python = ForkedPython(sys.executable, folder, scratch, variables)

    def run(self, tests: Iterable[str], *options: str) -> Finished:
        """Run tests in a new process."""
        return self._python.run(CODE, "-q", "-p", "no:cacheprovider", *options, *tests)

    @contextmanager
    def planted(self, mutant: Mutant) -> Iterator[None]:
        """Plant a mistake inside the block."""
        path = self.folder / mutant.file
        text = path.read_text(encoding="utf-8")
        if (count := text.count(mutant.old)) != 1:
            raise SystemExit(f"{mutant.name}: {mutant.file} has its text {count} times, not once")
        try:
            _write(path, text.replace(mutant.old, mutant.new))
            yield
        finally:
            _write(path, text)

    def check(self, mutant: Mutant) -> Outcome:
        """Run the tests of a mistake, then all tests of their files if these pass."""
        files = dict.fromkeys(test.partition("::")[0] for test in mutant.tests)
        with self.planted(mutant):
            result, tier = self.run(mutant.tests, "-x"), "default"
            if result.status in (PASSED, NO_TESTS):
                result, tier = self.run(files, "-x", "-m", "not gpu"), "full"
        failed = failures(result.out) if result.status == FAILED else []
        # Tests of the default selection have passed without any mistake, see `check_unchanged`.
        if failed and tier == "full" and self.run(failed, "-m", "not gpu").status != PASSED:
            raise SystemExit(f"{failed[0]} fails without a mistake, too")
        return Outcome(mutant, failed[0] if failed else "", tier, result.out + result.err)

    def close(self) -> None:
        """End the interpreter."""
        self._python.close()


def copy_tracked_files(folder: Path) -> None:
    """Copy the files that git tracks, as they are in the checkout."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)


def failures(output: str) -> list[str]:
    """Return the node ids of failed tests in pytest's summary, without tests of broken code."""
    lines = [line for line in output.splitlines() if line.startswith("FAILED ")]
    parts = [line.removeprefix("FAILED ").partition(" - ") for line in lines]
    return [name for name, _, reason in parts if not reason.startswith(BROKEN)]


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # Python compares modification times in seconds and sizes, which may be equal.
    for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        compiled.unlink()


def check_all(mutants: Sequence[Mutant], jobs: int) -> list[Outcome]:
    """Check that the tests pass, then every mistake; report each on standard error."""
    trees: SimpleQueue[Tree] = SimpleQueue()

    def check(mutant: Mutant) -> Outcome:
        tree, start = trees.get(), time.perf_counter()
        try:
            outcome = tree.check(mutant)
        finally:
            trees.put(tree)
        seconds = time.perf_counter() - start
        result = f"caught by {outcome.caught_by}" if outcome.caught_by else "NOT CAUGHT"
        tell(f"{seconds:4.0f} s  {mutant.area}: {mutant.name}: {result}")
        if not outcome.caught_by:
            tell("\n".join(outcome.output.splitlines()[-8:]))
        return outcome

    with tempfile.TemporaryDirectory(prefix="mutants-") as scratch:
        copies = [Tree(Path(scratch) / f"tree-{n}", Path(scratch) / "cache") for n in range(jobs)]
        try:
            check_unchanged(copies[0], mutants)
            for tree in copies:
                trees.put(tree)
            with ThreadPoolExecutor(jobs) as pool:
                return list(pool.map(check, mutants))
        finally:
            for tree in copies:
                tree.close()


def check_unchanged(tree: Tree, mutants: Sequence[Mutant]) -> None:
    """Run the tests of all mistakes on the unchanged code; exit if one fails."""
    start = time.perf_counter()
    result = tree.run(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
    if result.status not in (PASSED, NO_TESTS):
        lines = result.out.splitlines()
        failing = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
        raise SystemExit("\n".join(["tests fail without a mistake:", *failing, *lines[-1:]]))
    tell(f"{time.perf_counter() - start:4.0f} s  without a mistake the tests pass")


def tell(line: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the outcomes as Markdown."""
    lines = ["| area | mistake | file | caught by | tier |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        mutant, test = outcome.mutant, outcome.caught_by.replace("|", "\\|")
        caught = f"`{test.removeprefix('tests/')}`" if test else "**nothing**"
        tier = outcome.tier if test else ""
        lines.append(f"| {mutant.area} | {mutant.name} | `{mutant.file}` | {caught} | {tier} |")
    return "\n".join([*lines, "", summary(outcomes), ""])


def summary(outcomes: Sequence[Outcome]) -> str:
    """Return the number of caught mistakes, by tier."""
    tiers = Counter(outcome.tier for outcome in outcomes if outcome.caught_by)
    return (
        f"{tiers.total()} of {len(outcomes)} mistakes are caught: {tiers['default']} by the "
        f"default tier, {tiers['full']} by the full tier."
    )


def head() -> str:
    """Return the heading of the table, with its command, commit and date."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, check=True, text=True)
    command = shlex.join(["python", "-m", "tests.mutants", *sys.argv[1:]])
    day = time.strftime("%Y-%m-%d")
    return f"# Planted mistakes\n\n`{command}` at commit {commit.stdout.strip()}, {day}.\n\n"


def main() -> int:
    """Check mistakes and print the table; return 1 if too many are not caught."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("texts", nargs="*", help="parts of mistakes, areas or files; default: all")
    parser.add_argument("--jobs", type=int, default=1, help="mistakes that are checked at a time")
    parser.add_argument("--list", action="store_true", help="list the mistakes")
    parser.add_argument("--out", type=Path, help="file for the table")
    options = parser.parse_args()
    mutants = [
        mutant
        for mutant in MUTANTS
        if not options.texts
        or any(t in " ".join((mutant.area, mutant.name, mutant.file)) for t in options.texts)
    ]
    if options.list or not mutants:
        sys.stdout.writelines(f"{mutant.area}: {mutant.name}\n" for mutant in mutants)
        return not mutants
    outcomes = check_all(mutants, options.jobs)
    text = head() + table(outcomes)
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    full = sum(outcome.tier == "full" for outcome in outcomes if outcome.caught_by)
    survivors = sum(not outcome.caught_by for outcome in outcomes)
    return int(survivors > 0 or full > FULL_SHARE * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
