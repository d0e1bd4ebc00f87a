"""Mistake to plant in the code, for `tests/mutants.py`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """Mistake, with tests of which at least one must fail.

    Attributes:
        name: the mistake in one sentence.
        area: row group of the table.
        file: the changed file, relative to the root.
        old: text that occurs once in the file.
        new: text that replaces it.
        tests: test files or node ids; the smaller, the faster.
    """

    name: str
    area: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
