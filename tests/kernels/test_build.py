"""C++ kernels are built once, and where they cannot be it is said why."""

from __future__ import annotations

from pathlib import Path

import pytest
from hf_spec_kernels import build
from hf_spec_kernels.build import BuildError, load

from tests.compiler import needs_compiler

SOURCE = 'extern "C" int answer() { return %d; }\n'


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_SPEC_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "kernel_of_a_test" / "kernel.cpp"
    path.parent.mkdir()
    path.write_text(SOURCE % 42)
    return path


def built(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir())


@needs_compiler
def test_it_is_built_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(source).answer() == 42
    [name] = built(tmp_path)
    assert name.startswith("kernel_of_a_test-")
    load.cache_clear()
    monkeypatch.setattr(build, "_build", None)
    assert load(source).answer() == 42


@needs_compiler
def test_another_source_is_another_library(source: Path, tmp_path: Path) -> None:
    assert load(source).answer() == 42
    source.write_text(SOURCE % 43)
    load.cache_clear()
    assert load(source).answer() == 43
    assert len(built(tmp_path)) == 2


@needs_compiler
def test_another_compiler_has_its_own(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(source)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DANYTHING"))
    load.cache_clear()
    load(source)
    assert len(built(tmp_path)) == 2


@pytest.mark.parametrize(
    ("compiler", "message"),
    [("", "no C++ compiler was found"), ("/nowhere/c++", "found at CXX=/nowhere/c++")],
)
def test_a_machine_without_a_compiler(
    source: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, message: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(BuildError, match=message.replace("+", r"\+")):
        load(source)


@needs_compiler
def test_what_the_compiler_says_is_handed_on(source: Path, tmp_path: Path) -> None:
    source.write_text("not C++\n")
    with pytest.raises(BuildError, match=r"failed: .*kernel\.cpp:1"):
        load(source)
    assert built(tmp_path) == []


@needs_compiler
def test_a_folder_that_cannot_be_made(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_SPEC_CACHE", str(source))
    with pytest.raises(BuildError, match=r"kernel\.cpp"):
        load(source)
