"""Tests can be collected where packages of some extras are missing, as on a machine with a GPU."""

from __future__ import annotations

import pytest

from tests.forked_python import ForkedPython

MISSING = ("nbclient", "nbformat", "openai")
# Of tests that need one of them, by themselves or by what they import.
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
    found = new_python.run(COLLECT, "-c", *FOLDERS)
    assert found.status == 0, found.out + found.err
    for extra in ("serve", "notebooks"):
        assert f"needs the extra '{extra}'" in found.out
