"""Builds C++ kernels for the processor at hand, once per machine, and loads them.

As Triton does with its launchers on a GPU, this calls the machine's compiler when a kernel is first
needed and keeps what it made in a cache folder.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

# All of the processor that builds it: what is made runs here alone, and the name of its file says
# so. Compilers else prefer half of an AVX-512 register.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
WIDE = "-mprefer-vector-width=512"
SECONDS = 120
PACKAGE = Path(__file__).parent


class BuildError(RuntimeError):
    """A kernel cannot be built or loaded here; the message says why."""


def compiler() -> str | None:
    """The C++ compiler: the one that the variable `CXX` names, or the machine's."""
    if named := os.environ.get("CXX"):
        return shutil.which(named)
    return shutil.which("c++") or shutil.which("g++")


@cache
def load(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, built unless that was done before.

    Raises:
        BuildError: without a compiler that takes it, or without a place to keep what it makes.
    """
    return _load(source.parent.name, source)


@cache
def load_text(name: str, text: str) -> ctypes.CDLL:
    """The same of C++ that was written for the case, with the headers of this package."""
    return _load(name, PACKAGE / f"{name}.cpp", text)


def _load(name: str, place: Path, text: str | None = None) -> ctypes.CDLL:
    """Build the C++ file at `place`, or a text as if it were that."""
    if (found := compiler()) is None:
        wanted = os.environ.get("CXX")
        raise BuildError(f"no C++ compiler was found{f' at CXX={wanted}' if wanted else ''}")
    command = [found, *FLAGS, *([WIDE] if platform.machine() == "x86_64" else [])]
    try:
        text = place.read_text() if text is None else text
        path = _cache_folder() / f"{name}-{_key(text, command)}.so"
        if not path.exists():
            _build([*command, f"-I{place.parent}"], f'#line 1 "{place}"\n{text}', path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildError(str(error)) from error


def _cache_folder() -> Path:
    root = os.environ.get("HF_SPEC_CACHE") or Path.home() / ".cache" / "hf_spec"
    folder = Path(root).expanduser() / "kernels"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _key(text: str, command: list[str]) -> str:
    """What the built file depends on: its source, the compiler and the processor."""
    headers = [path.read_bytes() for path in sorted(PACKAGE.rglob("*.h"))]
    parts = (text.encode(), *headers, _processor(command[0]), " ".join(command).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@cache
def _processor(compiler: str) -> bytes:
    """What a compiler knows of itself and the processor at hand."""
    asked = subprocess.run(
        [compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull],
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    return asked.stdout


def _build(command: list[str], text: str, path: Path) -> None:
    """Compile to a name of its own first: another process may be building the same."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        done = subprocess.run(
            [*command, "-o", str(made), "-x", "c++", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no message"]
            raise BuildError(f"{command[0]} failed: {said[0]}")
        made.replace(path)
