"""Every registered strategy is documented, has a test file and stands in the shared matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.methods.registry import known_strategies, parse_strategy
from tests.tiny_models import STRATEGIES

ROOT = Path(__file__).parents[2]


def place_of(name: str) -> str:
    """Folder of the method that a strategy belongs to, or its file: "gsd/", "none.py"."""
    [_, _, method, *inner] = type(parse_strategy(name)).__module__.split(".")
    return f"{method}/" if inner else f"{method}.py"


@pytest.mark.parametrize("name", known_strategies())
class TestEveryStrategy:
    def test_it_has_a_row_in_the_readme(self, name: str) -> None:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        section = readme.partition("## Strategies")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith(f'| `"{name}"`')]
        assert len(rows) == 1
        assert f"`methods/{place_of(name)}`" in rows[0]


def test_the_matrix_is_complete() -> None:
    assert sorted(STRATEGIES) == known_strategies()
