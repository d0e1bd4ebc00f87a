"""A comparer of the tiny Llama, and comparisons that it made."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hf_spec.cli.ui.comparison import Comparer, Comparison
from hf_spec.methods.entries import parse_entries
from tests.serving.conftest import speller
from tests.tiny_models import build

PROMPT = "babebi" * 4
# A fixed length, because automatic lengths depend on timings of the machine.
LOOKUP = "lookup:copy_length=5"
NEW_TOKENS = 40


@pytest.fixture(scope="session")
def comparer() -> Comparer:
    return Comparer(build("llama"), speller(), parse_entries([LOOKUP, "none"]))


@pytest.fixture(scope="session")
def compared(comparer: Comparer) -> Callable[[str], Comparison]:
    return lambda strategy: comparer.compare(PROMPT, strategy, NEW_TOKENS)


@pytest.fixture(scope="session")
def comparison(compared: Callable[[str], Comparison]) -> Comparison:
    """Compare plain generation with lookup."""
    return compared(LOOKUP)
