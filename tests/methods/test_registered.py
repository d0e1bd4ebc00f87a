"""Every registered strategy is documented, has a test file and stands in the shared matrix."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_spec.methods.registry import known_strategies, parse_strategy
from tests.tiny_models import STRATEGIES

ROOT = Path(__file__).parents[2]


def module_of(name: str) -> str:
    return type(parse_strategy(name)).__module__.rpartition(".")[2]


@pytest.mark.parametrize("name", known_strategies())
class TestEveryStrategy:
    def test_it_has_a_row_in_the_readme(self, name: str) -> None:
        readme = (ROOT / "README.md").read_text(encoding="utf-8")
        section = readme.partition("## Strategies")[2].partition("\n## ")[0]
        rows = [line for line in section.splitlines() if line.startswith(f'| `"{name}"`')]
        assert len(rows) == 1
        assert f"`strategies/{module_of(name)}.py`" in rows[0]

    def test_it_has_a_test_file(self, name: str) -> None:
        assert (ROOT / "tests" / "strategies" / f"test_{module_of(name)}.py").is_file()


def test_the_matrix_is_complete() -> None:
    assert sorted(STRATEGIES) == known_strategies()
