"""The files of `custom_generate/` are written with an adapter, and are what they say."""

from __future__ import annotations

import ast
from pathlib import Path

from packaging.requirements import Requirement

import hf_spec
from hf_spec.adapters.custom_code import FILES, write_custom_generate
from hf_spec.installing import how_to_install


def test_they_are_written_and_replaced(tmp_path: Path) -> None:
    write_custom_generate(tmp_path)
    (tmp_path / "custom_generate/generate.py").write_text("changed")
    (tmp_path / "custom_generate/mine.txt").write_text("kept")
    write_custom_generate(tmp_path)
    found = {path.name: path.read_text() for path in (tmp_path / "custom_generate").iterdir()}
    assert found == {**FILES, "mine.txt": "kept"}


def test_the_code_imports_one_function_and_does_nothing_else() -> None:
    body = ast.parse(FILES["generate.py"]).body
    kinds = [type(node) for node in body]
    assert kinds == [ast.Expr, ast.ImportFrom, ast.Assign]
    assert isinstance(body[1], ast.ImportFrom)
    names = body[1].names[0]
    assert (body[1].module, names.name, names.asname) == ("hf_spec", "custom_generate", "generate")
    assert callable(hf_spec.custom_generate)


def test_this_version_is_one_that_is_asked_for() -> None:
    comment, line = FILES["requirements.txt"].splitlines()
    assert comment == f"# To install it, {how_to_install()}."
    requirement = Requirement(line)
    assert requirement.name == "hf-spec"
    assert hf_spec.__version__ in requirement.specifier
