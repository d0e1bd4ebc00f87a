"""The cache folder of libraries and models, also for users without a home folder."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hf_spec_kernels.cache_folder import cache_folder, check_private

from tests.compiler import needs_compiler
from tests.installed import ROOT

only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes another user")


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HF_SPEC_CACHE", raising=False)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def temporary(tmp_path: Path) -> Path:
    return tmp_path / "tmp" / f"hf_spec-{os.geteuid()}"


def test_the_variable_goes_first(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder("a") == tmp_path / ".cache" / "hf_spec" / "a"
    monkeypatch.setenv("HF_SPEC_CACHE", "~/mine")
    assert cache_folder() == tmp_path / "mine"
    # There is no fallback for the variable, so an error names its folder.
    monkeypatch.setenv("HF_SPEC_CACHE", "/proc/mine")
    assert cache_folder() == Path("/proc/mine")


@pytest.mark.parametrize("home", ["/proc/nobody", ""])
def test_a_home_that_cannot_be_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, home: str
) -> None:
    """The user "nobody" has such a home, and so do containers with a user of their own."""
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path.replace("~", home))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_folder("a") == temporary(tmp_path) / "a"
    assert stat.S_IMODE(temporary(tmp_path).stat().st_mode) == 0o700


def test_no_home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    assert cache_folder("a") == temporary(tmp_path) / "a"
    monkeypatch.setenv("HF_SPEC_CACHE", "~/mine")
    assert cache_folder("a") == temporary(tmp_path) / "a"


def test_a_temporary_folder_that_others_can_write_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    temporary(tmp_path).mkdir()
    temporary(tmp_path).chmod(0o777)
    with pytest.raises(PermissionError, match=r"can be written by other users; .*HF_SPEC_CACHE"):
        cache_folder()


@only_root
def test_files_of_somebody_else_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.touch(mode=0o600)
    check_private(path)
    os.chown(path, 54321, -1)
    with pytest.raises(PermissionError, match=r"belongs to the user 54321, not to 0; set HF_SPEC"):
        check_private(path)


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Return a folder that every user can access, unlike those of pytest."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        Path(name).chmod(0o1777)
        yield Path(name)


@pytest.mark.full
@only_root
@needs_compiler
def test_generation_without_a_home_or_a_passwd_entry(open_folder: Path) -> None:
    """`generate()` works for a user without a home and without an entry in /etc/passwd."""
    code = (
        "import os; os.environ.pop('HOME', None); os.environ.pop('HF_SPEC_CACHE', None)\n"
        "import torch, hf_spec\n"
        "from hf_spec.common.small_models import cache_root\n"
        "from tests.tiny_models import build, repetitive_prompt\n"
        "model = build('llama')\n"
        "call = {'inputs': repetitive_prompt(), 'max_new_tokens': 8}\n"
        "plain = model.generate(**call)\n"
        "os.setgroups([]); os.setgid(54321); os.setuid(54321)\n"
        "assert torch.equal(model.generate(**call, spec_strategy='lookup'), plain)\n"
        "print(cache_root(), *sorted(cache_root().iterdir()))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(open_folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    root = open_folder / "hf_spec-54321"
    assert finished.stdout.split() == [str(root), str(root / "kernels-54321")]
    assert "C++ kernels" not in finished.stderr
    assert len(list((root / "kernels-54321").glob("*.so"))) >= 1
