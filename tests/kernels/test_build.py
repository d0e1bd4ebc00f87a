"""C++ kernels are built once; files damaged by a crash or owned by another user are not loaded."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
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
    build._warn.cache_clear()
    return path


def kernels(tmp_path: Path) -> Path:
    return tmp_path / "cache" / f"kernels-{os.geteuid()}"


def built(tmp_path: Path) -> list[str]:
    """Return the names of the libraries; check that the only other files are their digests."""
    files = {path.name for path in kernels(tmp_path).iterdir()}
    libraries = sorted(name for name in files if name.endswith(".so"))
    assert files == {*libraries, *(f"{name[:-3]}.sha256" for name in libraries)}
    return libraries


def load_again(source: Path) -> ctypes.CDLL:
    """Load as a new process would."""
    load.cache_clear()
    return load(source)


@needs_compiler
def test_it_is_built_once(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(source).answer() == 42
    [name] = built(tmp_path)
    assert name.startswith("kernel_of_a_test-")
    monkeypatch.setattr(build, "_build", None)
    assert load_again(source).answer() == 42


def in_a_new_process(source: Path) -> subprocess.CompletedProcess[str]:
    """Load in a new process, since loading a damaged library can crash it."""
    code = (
        "import sys; from pathlib import Path; from hf_spec_kernels.build import load;"
        "print(load(Path(sys.argv[1])).answer())"
    )
    command = [sys.executable, "-c", code, str(source)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@needs_compiler
class TestDamage:
    @pytest.mark.by_default(size=(5000,))
    @pytest.mark.parametrize("size", [5000, 15000, 0])
    def test_a_library_that_was_cut_off_is_built_again(
        self, source: Path, tmp_path: Path, size: int
    ) -> None:
        # The library is larger than 15,000 bytes and needs the data at its end.
        source.write_text(f'{SOURCE % 42}extern "C" char filling[20000] = {{1}};\n')
        # In a new process, since truncating a loaded library crashes the process.
        assert in_a_new_process(source).returncode == 0
        [name] = built(tmp_path)
        path = kernels(tmp_path) / name
        whole = path.stat().st_size
        assert whole > 15000
        os.truncate(path, size)
        finished = in_a_new_process(source)
        assert (finished.returncode, finished.stdout) == (0, "42\n"), finished.stderr
        assert "is built again: its digest does not match" in finished.stderr
        assert path.stat().st_size == whole
        assert in_a_new_process(source).stderr == ""

    @pytest.mark.parametrize("damage", [None, "", "0" * 64, "\udcff"])
    def test_a_digest_that_is_wrong(self, source: Path, tmp_path: Path, damage: str | None) -> None:
        """A crash between the two files can leave a library with the digest of another build."""
        load(source)
        [name] = built(tmp_path)
        digest = (kernels(tmp_path) / name).with_suffix(".sha256")
        if damage is None:
            digest.unlink()
        else:
            digest.write_bytes(damage.encode(errors="surrogateescape"))
        assert load_again(source).answer() == 42
        assert len(digest.read_text()) == 64

    def test_both_files_are_on_the_disk_before_they_get_their_names(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        events: list[tuple[str, str]] = []
        sync, replace = os.fsync, Path.replace

        def spy_sync(descriptor: int) -> None:
            events.append(("sync", Path(f"/proc/self/fd/{descriptor}").resolve().name))
            sync(descriptor)

        def spy_replace(path: Path, target: Path) -> Path:
            events.append(("rename", path.name))
            return replace(path, target)

        monkeypatch.setattr(os, "fsync", spy_sync)
        monkeypatch.setattr(Path, "replace", spy_replace)
        load(source)
        [name] = built(tmp_path)
        names = [name, name.replace(".so", ".sha256")]
        for file in names:
            assert events.index(("sync", file)) < events.index(("rename", file))
        assert events[-1] == ("sync", kernels(tmp_path).name)


@needs_compiler
class TestOtherUsers:
    @pytest.mark.parametrize("mode", [0o720, 0o702, 0o777])
    def test_a_folder_that_they_can_write_is_refused(
        self, source: Path, tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture
    ) -> None:
        load(source)
        kernels(tmp_path).chmod(mode)
        with pytest.raises(BuildError, match=r"can be written by other users; .*set HF_SPEC_CACHE"):
            load_again(source)
        [record] = caplog.records
        assert record.levelno == logging.WARNING
        kernels(tmp_path).chmod(0o700)
        assert load_again(source).answer() == 42

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
    def test_a_folder_of_somebody_else_is_refused(self, source: Path, tmp_path: Path) -> None:
        load(source)
        os.chown(kernels(tmp_path), 54321, -1)
        with pytest.raises(BuildError, match="belongs to the user 54321, not to 0"):
            load_again(source)

    def test_a_library_that_they_can_write_is_built_again(
        self, source: Path, tmp_path: Path
    ) -> None:
        load(source)
        [name] = built(tmp_path)
        for path in (kernels(tmp_path) / name, (kernels(tmp_path) / name).with_suffix(".sha256")):
            before = path.stat().st_ino
            path.chmod(0o666)
            assert load_again(source).answer() == 42
            assert path.stat().st_ino != before
            assert path.stat().st_mode & 0o022 == 0

    def test_they_cannot_write_what_is_built(self, source: Path, tmp_path: Path) -> None:
        before = os.umask(0)
        try:
            load(source)
        finally:
            os.umask(before)
        for path in (kernels(tmp_path), *kernels(tmp_path).iterdir()):
            assert path.stat().st_mode & 0o077 == 0


@needs_compiler
class TestCompilerWithArguments:
    def test_they_are_handed_on(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """CXX may start with a program that runs the compiler, as in `ccache g++`."""
        launcher = tmp_path / "launcher"
        launcher.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/calls"\nexec "$@"\n')
        launcher.chmod(0o755)
        [real] = build.compiler() or []
        source.write_text('extern "C" int answer() { return ANSWER; }\n')
        monkeypatch.setenv("CXX", f"{launcher} {real} '-DANSWER= 43'")
        assert load(source).answer() == 43
        calls = (tmp_path / "calls").read_text().splitlines()
        assert len(calls) >= 1
        assert all(call.startswith(f"{real} -DANSWER= 43 ") for call in calls)
        monkeypatch.setenv("CXX", f"{real} -DANSWER=44")
        assert load_again(source).answer() == 44
        assert len(built(tmp_path)) == 2

    def test_a_path_with_spaces(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        [real] = build.compiler() or []
        (tmp_path / "my tools").mkdir()
        (tmp_path / "my tools" / "c++").symlink_to(real)
        monkeypatch.setenv("CXX", str(tmp_path / "my tools" / "c++"))
        assert load(source).answer() == 42

    def test_an_open_quote_is_named(self, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "g++ '-DX")
        with pytest.raises(BuildError, match=r"CXX=g.* '-DX cannot be parsed: No closing"):
            load(source)


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
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    compiler: str,
    message: str,
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setenv("PATH", "")
    for _ in range(2):
        with pytest.raises(BuildError, match=message.replace("+", r"\+")):
            load(source)
    # Logged once, as a warning.
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert message in record.getMessage()
    assert "install g++ or clang, or set CXX" in record.getMessage()


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
