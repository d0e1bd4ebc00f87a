"""Build C++ kernels for this machine's processor, once, and load them.

As Triton does with its launchers on a GPU, this calls the machine's compiler when a kernel is first
needed and keeps the library in a cache folder:

    kernels-UID/NAME-KEY.so        the key is a digest of source, compiler, flags and processor
    kernels-UID/NAME-KEY.sha256    the digest of the library

Loading a library runs its code. So the folder and the files must belong to this user, nobody else
may write to them, and a library is built again unless it has its digest.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

from hf_spec_kernels.cache_folder import cache_folder, check_private, make_private, user_id

logger = logging.getLogger(__name__)

# All of the processor that builds it: what is made runs here alone, and the name of its file says
# so. Compilers else prefer half of an AVX-512 register.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
WIDE = "-mprefer-vector-width=512"
SECONDS = 120
PACKAGE = Path(__file__).parent


class BuildError(RuntimeError):
    """A kernel cannot be built or loaded here; the message says why."""


def compiler() -> list[str] | None:
    """Return the words that call the C++ compiler: those of the variable `CXX`, or c++ or g++.

    None if there is no such compiler.
    """
    words = _words(os.environ.get("CXX", ""))
    for name, *arguments in [words] if words else [["c++"], ["g++"]]:
        if (found := shutil.which(name)) is not None:
            return [found, *arguments]
    return None


def _words(command: str) -> list[str]:
    # A path with spaces is taken as it is.
    if shutil.which(command):
        return [command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BuildError(f"CXX={command} cannot be read: {error}") from error


@cache
def load(source: Path) -> ctypes.CDLL:
    """Load the library of a C++ file, and build it unless that was done before.

    Raises:
        BuildError: without a compiler that takes it, or without a place to keep the library.
    """
    return _load(source.parent.name, source)


@cache
def load_text(name: str, text: str) -> ctypes.CDLL:
    """Load the library of generated C++, which may include the headers of this package."""
    return _load(name, PACKAGE / f"{name}.cpp", text)


def _load(name: str, place: Path, text: str | None = None) -> ctypes.CDLL:
    """Load the C++ file at `place`, or a text as if it were that; a failure is a warning, too."""
    try:
        return ctypes.CDLL(str(_library(name, place, text)))
    except (OSError, subprocess.SubprocessError, BuildError) as error:
        _warn(str(error))
        if isinstance(error, BuildError):
            raise
        raise BuildError(str(error)) from error


@cache
def _warn(reason: str) -> None:
    logger.warning("PyTorch's own operations replace C++ kernels, and are slower: %s", reason)


def _library(name: str, place: Path, text: str | None) -> Path:
    """Return the path of a library that was built from this source, here and for this user."""
    if (found := compiler()) is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"no C++ compiler was found{f' at CXX={wanted}' if wanted else ''}; install g++ or "
            "clang, or set CXX"
        )
    command = [*found, *FLAGS, *([WIDE] if platform.machine() == "x86_64" else [])]
    text = place.read_text() if text is None else text
    folder = _kernels_folder()
    path = folder / f"{name}-{_key(text, found, command)}.so"
    if not _is_intact(path):
        _build([*command, f"-I{place.parent}"], f'#line 1 "{place}"\n{text}', path)
    return path


def _kernels_folder() -> Path:
    """Return the private folder of libraries; users of a shared cache have one each."""
    user = user_id()
    folder = cache_folder("kernels" if user is None else f"kernels-{user}")
    make_private(folder)
    return folder


def _is_intact(path: Path) -> bool:
    """Return True if a library exists, belongs to this user and has the digest beside it."""
    if not path.exists():
        return False
    try:
        for file in (path, digest := _digest_of(path)):
            check_private(file)
        if hashlib.sha256(path.read_bytes()).hexdigest() == digest.read_text():
            return True
        reason = "it does not have the digest beside it"
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    logger.warning("%s is built again: %s", path, reason)
    return False


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _key(text: str, compiler: list[str], command: list[str]) -> str:
    """Return a digest of what a library depends on: source, compiler, flags and processor."""
    headers = [path.read_bytes() for path in sorted(PACKAGE.rglob("*.h"))]
    parts = (text.encode(), *headers, _processor(tuple(compiler)), " ".join(command).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@cache
def _processor(compiler: tuple[str, ...]) -> bytes:
    """Return the macros by which a compiler describes itself and this processor."""
    asked = subprocess.run(
        [*compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull],
        capture_output=True,
        check=True,
        timeout=SECONDS,
    )
    return asked.stdout


def _build(command: list[str], text: str, path: Path) -> None:
    """Compile into a folder of its own first: another process may be building the same."""
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
        digest = _digest_of(made)
        digest.write_text(hashlib.sha256(made.read_bytes()).hexdigest())
        for file in (made, digest):
            # Compilers follow the umask, which may let others write.
            file.chmod(0o700)
            _sync(file)
            file.replace(path.parent / file.name)
    # Some file systems cannot do this for a folder; a digest then shows what got lost.
    with suppress(OSError):
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, so that a crash does not leave it empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
