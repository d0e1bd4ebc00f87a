"""The packages that setup.cfg names are the ones on disk, and no setting stands in two files."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).parents[1]


def read_setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def packages_under(folder: Path) -> set[str]:
    """Dotted names of a package and its sub-packages: every folder with a module in it."""
    modules = (path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)
    return {".".join(path.parent.relative_to(folder.parent).parts) for path in modules}


def test_setup_cfg_names_every_package() -> None:
    named = set(read_setup_cfg()["options"]["packages"].split())
    roots = ("hf_spec", "kernels/hf_spec_kernels")
    on_disk = {name for root in roots for name in packages_under(ROOT / root)}
    assert named == on_disk


def test_every_package_has_an_init() -> None:
    missing = [
        name
        for name in packages_under(ROOT / "hf_spec")
        if not (ROOT / name.replace(".", "/") / "__init__.py").is_file()
    ]
    assert not missing


def test_pyproject_leaves_the_package_to_setup_cfg() -> None:
    assert "[project]" not in (ROOT / "pyproject.toml").read_text().splitlines()
    assert not [name for name in read_setup_cfg().sections() if "tool" in name]
