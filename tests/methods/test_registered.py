"""Every registered strategy is documented and has a row in the shared test matrix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import hf_spec.methods
from hf_spec.methods.registry import known_strategies, parse_strategy
from hf_spec.methods.trainings import known_trainings
from tests.tiny_models import STRATEGIES, build, repetitive_prompt, speculation

ROOT = Path(__file__).parents[2]


def place_of(name: str) -> str:
    """Return the folder or file of the method that a strategy belongs to: "gsd/", "none.py"."""
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


def test_the_package_lists_every_method() -> None:
    """The table in the docstring of `hf_spec.methods` has one correct row per strategy."""
    _, _, table, _ = re.split(r"^=[= ]+$", hf_spec.methods.__doc__ or "", flags=re.MULTILINE)
    rows = {row[0]: row for row in map(str.split, table.strip().splitlines())}
    assert sorted(rows) == known_strategies()
    assert {name: row[1] for name, row in rows.items()} == {
        name: place_of(name) for name in known_strategies()
    }
    trained_here = {name for name, row in rows.items() if row[-1] in {"here", "either"}}
    optional = {name for name, row in rows.items() if row[-1] == "optional"}
    trainings = {training.name for training in known_trainings()}
    # The training "medusa" is for the strategy "heads".
    assert trained_here | {"draft"} == trainings - {"medusa"} | {"heads"}
    assert "draft" in optional


@pytest.mark.parametrize(
    ("alias", "name"), [("medusa", "heads"), ("dflash", "block"), ("dspark", "block")]
)
def test_other_names_of_strategies(alias: str, name: str) -> None:
    call = {
        "input_ids": repetitive_prompt(),
        "max_new_tokens": 6,
        "do_sample": False,
        "return_dict_in_generate": True,
        "assistant": speculation("llama", name)["assistant"],
    }
    model = build("llama")
    by_alias, by_name = (model.generate(**call, spec_strategy=s) for s in (alias, name))
    assert torch.equal(by_alias.sequences, by_name.sequences)
    drafted = [output.spec_stats.drafted_tokens for output in (by_alias, by_name)]
    assert drafted[0] == drafted[1] > 0
    assert parse_strategy(alias) == parse_strategy(name)
