"""`hf_spec.methods.builtin` registers every built-in method with a single import."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import hf_spec
from hf_spec.adapters import adapter, published
from hf_spec.methods import builtin
from hf_spec.methods.registry import known_strategies, parse_strategy
from tests.forked_python import ForkedPython

METHODS = Path(builtin.__file__).parent
# Folder of the code that Falcon, EAGLE and MTP heads share: rows of (token, feature) pairs.
SHARED = "feature_pairs"
FOLDERS = sorted({init.parent.name for init in METHODS.glob("*/__init__.py")} - {SHARED})


def callers(function: str) -> set[str]:
    """Return the modules of the method folders that call `function`."""
    return {
        ".".join(("hf_spec.methods", *path.relative_to(METHODS).with_suffix("").parts))
        for path in METHODS.rglob("*.py")
        if any(
            isinstance(node, ast.Call) and ast.unparse(node.func) == function
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        )
    }


def builders(
    records: dict[str, adapter.AdapterMethod] | dict[str, published.PublishedFamily],
) -> set[str]:
    modules = {record.build.__module__ for record in records.values()}
    return {name for name in modules if name.startswith("hf_spec.methods.")}


def test_every_folder_registers_a_strategy() -> None:
    modules = {type(parse_strategy(name)).__module__ for name in known_strategies()}
    assert set(FOLDERS) <= {module.split(".")[2] for module in modules}


def test_every_adapter_method_is_registered() -> None:
    assert adapter.known_methods() == ["disco", "draft", "falcon", "sdsat"]
    assert callers("register_method") == builders(adapter._METHODS)


def test_every_family_of_published_heads_is_registered() -> None:
    assert callers("register_family") == builders(published._FAMILIES)


@pytest.mark.parametrize("folder", FOLDERS)
def test_one_import_per_folder(folder: str) -> None:
    """`builtin` imports exactly one module of each folder, which registers the whole folder."""
    imports = ast.parse(Path(builtin.__file__).read_text(encoding="utf-8")).body
    modules = [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    assert len([name for name in modules if name.startswith(f"hf_spec.methods.{folder}.")]) == 1


def test_configs_are_exported() -> None:
    configs = {type(parse_strategy(name)).__name__ for name in known_strategies()}
    assert configs == set(builtin.__all__)
    assert configs <= set(hf_spec.__all__)


@pytest.mark.full
def test_the_module_is_enough(new_python: ForkedPython) -> None:
    code = (
        "import sys, hf_spec.methods.builtin; "
        "from hf_spec.adapters.adapter import known_methods; "
        "print(*known_methods(), 'hf_spec.public' in sys.modules)"
    )
    done = new_python.run(code, "/usr/bin/hf-spec", "card")
    assert done.out.split() == ["disco", "draft", "falcon", "sdsat", "False"]
