"""Build C++ kernels for this machine's processor, once, and load them.

The machine's compiler is called when a kernel is first needed, and the library is cached:

    kernels-UID/NAME-KEY.so        the key is a digest of source, compiler, flags and processor
    kernels-UID/NAME-KEY.sha256    the digest of the library

Loading a library runs its code. Folder and files must therefore belong to this user and not be
writable by others, and a library whose digest does not match is built again.
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

# `native` is safe since the file name contains the processor. By default compilers use only half of
# an AVX-512 register.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-shared", "-fPIC")
WIDE = "-mprefer-vector-width=512"
SECONDS = 120
PACKAGE = Path(__file__).parent


class BuildError(RuntimeError):
    """A kernel cannot be built or loaded on this machine."""


def compiler() -> list[str] | None:
    """Return the command of the C++ compiler: the variable `CXX`, else c++ or g++; None without."""
    words = _words(os.environ.get("CXX", ""))
    for name, *arguments in [words] if words else [["c++"], ["g++"]]:
        if (found := shutil.which(name)) is not None:
            return [found, *arguments]
    return None


def _words(command: str) -> list[str]:
    # A path may contain spaces.
    if shutil.which(command):
        return [command]
    try:
        return shlex.split(command)
    except ValueError as error:
        raise BuildError(f"CXX={command} cannot be parsed: {error}") from error


@cache
def load(source: Path, text: str | None = None) -> ctypes.CDLL:
    """Load the library of a C++ file, named after its folder; build it on a miss.

    Generated C++ is given as `text` instead of the contents of the file, which need not exist. It
    may include headers of the folder. Failures are logged as warnings.

    Raises:
        BuildError: if there is no suitable compiler or no usable cache folder.
    """
    try:
        return ctypes.CDLL(str(_library(source, text)))
    except (OSError, subprocess.SubprocessError, BuildError) as error:
        _warn(str(error))
        raise BuildError(str(error)) from error


@cache
def _warn(reason: str) -> None:
    logger.warning("PyTorch operations replace C++ kernels and are slower: %s", reason)


def _library(source: Path, text: str | None) -> Path:
    if (words := compiler()) is None:
        wanted = os.environ.get("CXX")
        raise BuildError(
            f"no C++ compiler was found{f' at CXX={wanted}' if wanted else ''}; install g++ or "
            "clang, or set CXX"
        )
    command = [*words, *FLAGS, *([WIDE] if platform.machine() == "x86_64" else [])]
    text = source.read_text() if text is None else text
    user = user_id()
    folder = cache_folder("kernels" if user is None else f"kernels-{user}")
    make_private(folder)
    path = folder / f"{source.parent.name}-{_key(text, words, command)}.so"
    if not _is_intact(path):
        _build([*command, f"-I{source.parent}"], f'#line 1 "{source}"\n{text}', path)
    return path


def _is_intact(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        for file in (path, digest := _digest_of(path)):
            check_private(file)
        if hashlib.sha256(path.read_bytes()).hexdigest() == digest.read_text():
            return True
        reason = "its digest does not match"
    except (OSError, UnicodeDecodeError) as error:
        reason = str(error)
    logger.warning("%s is built again: %s", path, reason)
    return False


def _digest_of(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _key(text: str, compiler: list[str], command: list[str]) -> str:
    headers = [path.read_bytes() for path in sorted(PACKAGE.rglob("*.h"))]
    parts = (text.encode(), *headers, _processor(tuple(compiler)), " ".join(command).encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:24]


@cache
def _processor(compiler: tuple[str, ...]) -> bytes:
    """Return the predefined macros of a compiler, which describe it and this processor."""
    command = [*compiler, "-march=native", "-E", "-dM", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True, check=True, timeout=SECONDS).stdout


def _build(command: list[str], text: str, path: Path) -> None:
    # Another process may build the same.
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        library = Path(folder) / path.name
        process = subprocess.run(
            [*command, "-o", str(library), "-x", "c++", "-"],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            timeout=SECONDS,
        )
        if process.returncode:
            errors = process.stderr.strip().splitlines() or ["no message"]
            raise BuildError(f"{command[0]} failed: {errors[0]}")
        digest = _digest_of(library)
        digest.write_text(hashlib.sha256(library.read_bytes()).hexdigest())
        for file in (library, digest):
            # Compilers apply the umask, which may allow others to write.
            file.chmod(0o700)
            _sync(file)
            file.replace(path.parent / file.name)
    # Some file systems cannot sync a folder; the digest detects lost data.
    with suppress(OSError):
        _sync(path.parent)


def _sync(path: Path) -> None:
    """Flush a file or folder to disk, so that a crash does not leave it empty."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
