"""An editable install works with type checkers, and with Python started anywhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.installed import ROOT, User, build_editable, copy_sources, install

# Packages shared with the environment of the tests; checking them takes most of a minute.
MYPY = """
[mypy]
[mypy-torch.*,transformers.*,peft.*,numpy.*,huggingface_hub.*,safetensors.*,tqdm.*,gguf.*,triton.*]
follow_imports = skip
"""

MISTAKES = """
import hf_spec
reveal_type(hf_spec.LookupConfig(copy_length=3))
hf_spec.LookupConfig(copy_lenght=3)
hf_spec.truncated_draft(3, "two")
import hf_spec_kernels
hf_spec_kernels.no_such_name
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the checkout."""
    return copy_sources(tmp_path_factory.mktemp("checkout") / "hf_spec")


@pytest.fixture(scope="module")
def user(source: Path, tmp_path_factory: pytest.TempPathFactory) -> User:
    """Return a user elsewhere, in whose environment the checkout is installed."""
    wheel = build_editable(source, tmp_path_factory.mktemp("wheel"))
    programs = install(wheel, tmp_path_factory.mktemp("environment"))
    return User(programs, tmp_path_factory.mktemp("home"), {})


def mypy(user: User, code: str) -> list[str]:
    """Return the output of the type checker."""
    (user.home / "mypy.ini").write_text(MYPY)
    (user.home / "example.py").write_text(code)
    report = (
        "from mypy import api; import sys; "
        "out, err, _ = api.run(['--python-executable', sys.executable, 'example.py']); "
        "print(out, err)"
    )
    return user.python(report).splitlines()


@pytest.mark.full
def test_a_type_checker_has_no_complaint_about_the_quickstart(user: User) -> None:
    text = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    assert "spec_strategy=" in blocks[0]
    lines = mypy(user, "\n".join(blocks))
    assert [line for line in lines if "Success" in line], lines


@pytest.mark.full
def test_a_type_checker_knows_what_the_names_are(user: User) -> None:
    said = "\n".join(mypy(user, MISTAKES))
    assert (
        'example.py:3: note: Revealed type is "hf_spec.methods.lookup.drafter.LookupConfig"' in said
    )
    assert 'example.py:4: error: Unexpected keyword argument "copy_lenght"' in said
    assert 'example.py:5: error: Argument 2 to "truncated_draft" has incompatible type' in said
    assert "example.py:7: error: Module has no attribute" in said, said


@pytest.mark.full
def test_python_reads_the_checkout_and_what_is_added_to_it(user: User, source: Path) -> None:
    (source / "hf_spec" / "added_later.py").write_text("HERE = True\n")
    find = "import importlib.util as u; print(u.find_spec({!r}).origin)"
    for name, path in (
        ("hf_spec", "hf_spec/__init__.py"),
        ("hf_spec_kernels", "kernels/hf_spec_kernels/__init__.py"),
        ("hf_spec.added_later", "hf_spec/added_later.py"),
    ):
        assert Path(user.python(find.format(name)).strip()).resolve() == source / path


def test_installing_again_mends_what_was_there(tmp_path: Path) -> None:
    source = copy_sources(tmp_path / "checkout")
    stale = source / "build" / "editable" / "hf_spec" / "__init__.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    for _ in range(2):
        build_editable(source, tmp_path)
        assert stale.stat().st_size > 0
        assert stale.resolve() == source / "hf_spec" / "__init__.py"


def test_nothing_else_can_be_imported_from_the_checkout(user: User, source: Path) -> None:
    (source / "tests").mkdir(exist_ok=True)
    code = "import importlib.util as u; print(u.find_spec('kernels'), u.find_spec('tests'))"
    assert user.python(code) == "None None\n"


@pytest.mark.full
def test_it_runs_without_and_beside_the_package_called_kernels(user: User) -> None:
    run = "import hf_spec, hf_spec_kernels, transformers; print(hf_spec.known_strategies())"
    assert "lookup" in user.python(run)
    [packages] = user.programs.parent.glob("lib/python*/site-packages")
    other = packages / "kernels" / "__init__.py"
    other.parent.mkdir()
    other.write_text("THEIRS = True\n")
    try:
        assert "lookup" in user.python(run)
        assert user.python("import kernels; print(kernels.THEIRS)") == "True\n"
    finally:
        other.unlink()
