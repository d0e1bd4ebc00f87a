"""Random calls of `generate()` yield the tokens of plain `generate()`; see `random_cases`."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from tests.compiler import needs_compiler
from tests.random_cases import Case, differences, draw

PATIENCE = 120.0


def check(numbers: range, **changes: Any) -> None:
    wrong: list[str] = []
    for number in numbers:
        case = draw(number)
        case = replace(case, changes={**case.changes, **changes})
        found = differences(case, case.generate(False), case.generate(True))
        wrong += [f"case {number}: {case}: {reason}" for reason in found]
    assert not wrong, "\n\n".join(wrong)


def check_in_two_threads(numbers: range) -> None:
    """Check pairs of concurrent calls on one model; in every third pair one call is plain."""
    wrong: list[str] = []
    for number in numbers:
        first = draw(number)
        second = _on_the_same_model(first, number)
        expected = [case.generate(False) for case in (first, second)]
        barrier = threading.Barrier(2)

        def run(case: Case, speculative: bool, barrier: Any = barrier) -> Any:
            barrier.wait(PATIENCE)
            return case.generate(speculative)

        with ThreadPoolExecutor(2) as pool:
            jobs = [pool.submit(run, first, True), pool.submit(run, second, bool(number % 3))]
            outputs = [job.result(timeout=PATIENCE) for job in jobs]
        for case, plain, output in zip((first, second), expected, outputs, strict=True):
            found = differences(case, plain, output)
            wrong += [f"case {number} in two threads: {case}: {reason}" for reason in found]
    assert not wrong, "\n\n".join(wrong)


def _on_the_same_model(case: Case, number: int) -> Case:
    other = draw(number + 1_000_000)
    strategy = "lookup" if other.strategy == "falcon" else other.strategy
    return Case(case.model, strategy, other.changes, other.lengths, other.seed, other.options)


@pytest.mark.by_default(start=(0,))
@pytest.mark.smoke
@pytest.mark.parametrize("start", range(0, 60, 20))
def test_random_cases(start: int) -> None:
    check(range(start, start + 20))


@pytest.mark.full
def test_random_cases_in_two_threads() -> None:
    check_in_two_threads(range(15))


@pytest.mark.full
@needs_compiler
def test_random_cases_with_compiled_layers() -> None:
    check(range(5000, 5030), compile=True)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("start", range(6000, 8000, 100))
def test_many_random_cases_with_compiled_layers(start: int) -> None:
    check(range(start, start + 100), compile=True)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 2500, 100))
def test_many_random_cases(start: int) -> None:
    check(range(start, start + 100))


@pytest.mark.slow
@pytest.mark.parametrize("start", range(3000, 3200, 50))
def test_many_random_cases_in_two_threads(start: int) -> None:
    check_in_two_threads(range(start, start + 50))
