"""Layout described in CONTRIBUTING: ordered subpackages (rooms), no cycles, mirrored tests."""

from __future__ import annotations

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Top floor first: a room may import from itself and from those after it.
ROOMS = (
    "cli",
    "evaluation",
    "serving",
    "generation",
    "methods",
    "training",
    "drafting",
    "adapters",
    "engine",
    "backend",
    "common",
)
# Modules that users import, above every room.
FRONT = ("hf_spec", "hf_spec.__main__", "hf_spec.public")
LARGEST_SHARE = 0.15


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {name_of(path): path for path in sorted((ROOT / "hf_spec").rglob("*.py"))}
MODULES = [name for name, path in PATHS.items() if path.stem not in {"__init__", "__main__"}]
STUDIES = sorted((ROOT / "examples" / "studies").rglob("*.py"))


def floor(module: str) -> int:
    """Return the floor of a module, counted from the top; modules without a room are lowest."""
    if module in FRONT:
        return -1
    room = module.split(".")[1]
    return ROOMS.index(room) if room in ROOMS else len(ROOMS)


def imported(path: Path) -> set[str]:
    """Return every module that a file imports, also inside its functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            # `from package import module` names a module as well.
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                names.add(inner if inner in PATHS else node.module or "")
    return names


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Return the names that each module imports."""
    return {name: imported(path) for name, path in PATHS.items()}


def test_the_modules_are_found() -> None:
    assert "hf_spec.engine.decode.loop" in MODULES
    assert {name.split(".")[1] for name in MODULES if name.count(".") > 1} == set(ROOMS)


def test_no_import_runs_up(imports: dict[str, set[str]]) -> None:
    upward = {
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names & set(PATHS)
        if floor(name) < floor(module)
    }
    assert upward == set()


def test_there_are_no_circles(imports: dict[str, set[str]]) -> None:
    known = {name: (found & set(PATHS)) - {name} for name, found in imports.items()}
    try:
        TopologicalSorter(known).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


def test_nothing_installed_imports_examples_or_tests(imports: dict[str, set[str]]) -> None:
    roots = {name.split(".")[0] for found in imports.values() for name in found}
    assert not roots & {"examples", "tests", "docs"}


def room_of(module: str) -> str:
    """Return the room of a module; folders of `engine/` and `methods/` count as rooms."""
    parts = module.split(".")
    inner = len(parts) > 2 and parts[1] in {"engine", "methods"}
    return ".".join(parts[1 : 3 if inner else 2])


def test_no_room_is_too_large() -> None:
    lines = Counter[str]()
    for name, path in PATHS.items():
        lines[room_of(name)] += len(path.read_text().splitlines())
    room, most = lines.most_common(1)[0]
    assert most / lines.total() < LARGEST_SHARE, room


def test_packages_hand_names_on_and_define_nothing() -> None:
    defining = [
        name
        for name, path in PATHS.items()
        if path.stem == "__init__" and name != "hf_spec" and defines(path)
    ]
    assert defining == []


def defines(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    own = [node for node in body if not isinstance(node, (ast.Expr, ast.Import, ast.ImportFrom))]
    return any(not isinstance(node, ast.Assign) for node in own)


def test_every_module_has_its_test_file() -> None:
    """hf_spec/a/b.py is tested by tests/a/test_b.py; studies follow the same rule."""
    paths = [PATHS[name].relative_to(ROOT / "hf_spec") for name in MODULES]
    paths += [path.relative_to(ROOT / "examples") for path in STUDIES]
    mirrored = [ROOT / "tests" / path.with_name(f"test_{path.name}") for path in paths]
    assert [path for path in mirrored if not path.is_file()] == []


def test_kernels_is_no_package() -> None:
    """Hugging Face has a package called `kernels`."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_notes_stay_out_of_the_top_level() -> None:
    texts = {path.name for path in ROOT.iterdir() if path.suffix in {".md", ".txt"}}
    documents = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert texts == documents | {"constraints.txt", "constraints-oldest.txt"}
