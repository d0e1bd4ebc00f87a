"""The layout that STYLE and DESIGN promise: mirrored tests, and imports in one direction."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path.relative_to(ROOT)
    for path in (ROOT / "hf_spec").rglob("*.py")
    if path.name not in {"__init__.py", "__main__.py"}
)

# What a package may not import. `bench`, `training` and the command line are ends: only they use
# each other.
FORBIDDEN = {
    "hf_spec/decoding": ("hf_spec.strategies", "hf_spec.models"),
    "hf_spec/models": ("hf_spec.strategies",),
}
ENDS = ("hf_spec.bench", "hf_spec.commands", "hf_spec.demo", "hf_spec.training", "hf_spec.cli")


def mirrored_test(module: Path) -> Path:
    """hf_spec/a/b.py -> tests/a/test_b.py."""
    inside = module.relative_to("hf_spec")
    return ROOT / "tests" / inside.with_name(f"test_{inside.name}")


def imported(module: Path) -> set[str]:
    """Every module that a file imports, also inside its functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse((ROOT / module).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} imports relatively"
            names.add(node.module or "")
            # `from package import module` may name a module as well.
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def test_the_modules_are_found() -> None:
    assert Path("hf_spec/decoding/loop.py") in MODULES


def test_every_module_has_its_test_file() -> None:
    missing = [str(module) for module in MODULES if not mirrored_test(module).is_file()]
    assert missing == []


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_one_way(module: Path) -> None:
    refused = [
        name
        for folder, names in FORBIDDEN.items()
        if module.is_relative_to(folder)
        for name in names
    ]
    if not any(module.with_suffix("").is_relative_to(end.replace(".", "/")) for end in ENDS):
        refused += ENDS
    wrong = {
        name
        for name in imported(module)
        if any(name == other or name.startswith(f"{other}.") for other in refused)
    }
    assert wrong == set()


def test_kernels_is_no_package() -> None:
    """Hugging Face's own package is called `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
