"""The package as users get it: built, and installed where this checkout is not importable."""

from __future__ import annotations

import os
import shutil
import site
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.forked_python import ForkedPython

ROOT = Path(__file__).parents[1]
# Files that a build reads. They are copied first, because a build writes files next to them.
SOURCES = ("LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.cfg")
PACKAGES = ("hf_spec", "kernels/hf_spec_kernels")
# Variables that point to this checkout, or that these tests set.
OWN_VARIABLES = ("HF_HUB_OFFLINE", "PYTHONPATH", "TRITON_INTERPRET")

# Code of the program `hf-spec`.
COMMAND = "from hf_spec.cli import main; main()"


@dataclass(frozen=True)
class Built:
    """Files of a release.

    Attributes:
        archive: the source archive.
        wheel: built from the archive.
    """

    archive: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build the source archive and, from it, the wheel."""
    source = copy_sources(folder / "source")
    archive = _run_backend("build_sdist", source, folder)
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return Built(archive, _run_backend("build_wheel", unpacked, folder))


def build_editable(source: Path, folder: Path) -> Path:
    """Build the wheel that `pip install -e source` makes and installs."""
    return _run_backend("build_editable", source, folder)


def copy_sources(folder: Path) -> Path:
    """Copy the files that a build reads and return the folder."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, folder)
    return folder


def _run_backend(verb: str, source: Path, out: Path) -> Path:
    code = f"from setuptools import build_meta as b; print(b.{verb}({str(out)!r}))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=source, check=True, capture_output=True, text=True
    )
    return out / done.stdout.split()[-1]


@dataclass(frozen=True)
class User:
    """User in an empty folder, with the wheel in a separate environment.

    Attributes:
        programs: folder of the environment's programs.
        home: working directory of the programs.
        variables: added to those of this process.
    """

    programs: Path
    home: Path
    variables: dict[str, str]
    _forks: list[ForkedPython] = field(default_factory=list, repr=False)

    def run(self, program: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment, which must exit with status 0."""
        done = subprocess.run(
            [self.programs / program, *map(str, arguments)],
            cwd=self.home,
            env=self._environment(),
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{program} {arguments}: {done.stdout}{done.stderr}"
        return done

    @contextmanager
    def forking(self, scratch: Path) -> Iterator[None]:
        """Make `hf_spec()` fork instead of starting an interpreter; see `ForkedPython`."""
        python = str(self.programs / "python")
        self._forks.append(ForkedPython(python, self.home, scratch, self._environment()))
        try:
            yield
        finally:
            self._forks.pop().close()

    def hf_spec(self, *arguments: Any) -> str:
        """Return the output of `hf-spec`, which must exit with status 0."""
        if not self._forks:
            return self.run("hf-spec", *arguments).stdout
        done = self._forks[-1].run(COMMAND, "hf-spec", *map(str, arguments))
        assert done.status == 0, f"hf-spec {arguments}: {done.out}{done.err}"
        return done.out

    def _environment(self) -> dict[str, str]:
        known = {name: os.environ[name] for name in os.environ if name not in OWN_VARIABLES}
        return {**known, **self.variables}

    def python(self, code: str) -> str:
        """Return the output of a program."""
        return self.run("python", "-c", code).stdout


def install(wheel: Path, folder: Path) -> Path:
    """Create an environment with the wheel and return the folder of its programs.

    The other packages are those of the environment that runs the tests, because installing torch
    again would take minutes. A .pth file adds their folder to the path; .pth files in that folder,
    such as that of an editable install of this checkout, are not read.
    """
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    programs = folder / "bin"
    options = ("--no-deps", "--no-index", "--quiet", "--disable-pip-version-check")
    pip = [sys.executable, "-m", "pip", "--python", programs / "python", "install", *options]
    subprocess.run([*pip, wheel], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return programs
