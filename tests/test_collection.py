"""Tests can be collected and planted mistakes can be checked, without running either."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.forked_python import ForkedPython
from tests.mutants import MUTANTS

ROOT = Path(__file__).parents[1]
MISSING = ("nbclient", "nbformat", "openai")
# Folders of tests that need one of these packages, directly or through an import.
FOLDERS = [f"tests/{name}" for name in ("cli", "examples", "integrations", "serving", "studies")]

COLLECT = f"""
import sys
sys.modules.update(dict.fromkeys({MISSING}))
import pytest
options = ["-m", "gpu", "--collect-only", "-q", "-p", "no:cacheprovider", "-n", "0"]
sys.exit(pytest.main([*options, *sys.argv[1:]]))
"""


@pytest.mark.full
def test_missing_packages_skip_what_needs_them(new_python: ForkedPython) -> None:
    """Machines with a GPU, which run these tests, may have incomplete extras."""
    found = new_python.run(COLLECT, "-c", *FOLDERS)
    assert found.status == 0, found.out + found.err
    for extra in ("serve", "notebooks"):
        assert f"needs the extra '{extra}'" in found.out


def test_every_planted_mistake_has_its_place_and_its_tests() -> None:
    """`python -m tests.mutants` can still run after a change of the code."""
    counts = [(mutant.name, _read(mutant.file).count(mutant.old)) for mutant in MUTANTS]
    assert [(name, count) for name, count in counts if count != 1] == []
    ids = [test.split("::") for mutant in MUTANTS for test in mutant.tests]
    missing = [(file, name) for file, *names in ids for name in names if name not in _read(file)]
    assert missing == []


def _read(file: str) -> str:
    return (ROOT / file).read_text(encoding="utf-8")
