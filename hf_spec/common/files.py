"""Atomic and resumable files, and parsing of untrusted ones."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_spec.common.errors import OptionError


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Write a file or folder atomically: it appears at `path` by a rename at the end.

    Yields a temporary path to write to; if the block raises, it is removed and `path` is unchanged.
    An existing file or folder is replaced. Only one process may write at a time.
    """
    part = path.with_name(f"{path.name}.part")
    # Left by an interrupted process.
    _remove(part)
    try:
        yield part
        # Renaming replaces a file, but not a folder.
        if path.is_dir():
            _remove(path)
        part.replace(path)
    finally:
        _remove(part)


def check_regular(path: Path) -> None:
    """Raise `OptionError` for a device, pipe or folder, whose reading may block or never end."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):
        kinds = {
            stat.S_IFDIR: "a folder",
            stat.S_IFIFO: "a pipe",
            stat.S_IFCHR: "a device",
            stat.S_IFBLK: "a device",
            stat.S_IFSOCK: "a socket",
        }
        kind = kinds.get(stat.S_IFMT(mode), "a special file")
        raise OptionError(f"{path} is {kind}; use a regular file")


def read_text(path: Path) -> str:
    r"""Return the text of a regular UTF-8 file without byte order mark, with line ends "\n"."""
    check_regular(path)
    try:
        # Text mode would treat a single "\r" as the end of a line.
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is not UTF-8 text ({error}); save it as UTF-8") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse untrusted JSON; an `OptionError` about it names `where`, its file and line."""
    try:
        return json.loads(text)
    except RecursionError as error:
        raise OptionError(f"{where}: nested too deeply; remove the line") from error
    except ValueError as error:
        raise OptionError(f"{where}: not JSON, {error}; remove the line") from error


def parse_json_lines(text: str, source: object) -> Iterator[tuple[int, Any]]:
    r"""Yield the number (from 1) and the value of every JSON line that is not blank.

    Only "\n" ends a line: JSON strings may contain other line separators, such as U+2028.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, parse_json(line, f"{source}, line {number}")


def write_json(path: Path, content: Any, **settings: Any) -> None:
    """Write JSON atomically to a regular file; `settings` are those of `json.dumps`."""
    check_regular(path)
    with atomic_write(path) as part:
        part.write_text(json.dumps(content, **{"indent": 1, **settings}), encoding="utf-8")


def check_new_folder(folder: Path) -> None:
    """Raise `OptionError` if an output folder exists and is not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} exists already; use a new or empty folder")


def complete_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON lines after the first of a file that another process may be appending to.

    The first line is `head`, which identifies the run; another one raises `OptionError`. A missing
    file has no lines. An incomplete last line is skipped.
    """
    check_regular(path)
    content = _complete_part(path)
    if not content:
        # An interrupted run may leave a prefix of its head; anything else is another file.
        prefix = path.read_bytes() if path.exists() else b""
        if not json.dumps(head).encode().startswith(prefix):
            raise OptionError(f"{path} has other contents; choose another file")
        return []
    first, *others = content.removesuffix(b"\n").split(b"\n")
    try:
        stored_head = json.loads(first)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} has other contents; choose another file") from error
    check_head(path, stored_head, head)
    lines = []
    for number, line in enumerate(others, start=2):
        value = parse_json(line, where := f"{path}, line {number}")
        if not isinstance(value, dict):
            raise OptionError(f"{where}: not an object; remove the line")
        lines.append(value)
    return lines


def check_head(path: Path, stored: Any, head: Mapping[str, Any]) -> None:
    """Raise `OptionError` unless the head `stored` in a file is `head`; it names what differs."""
    if not isinstance(stored, dict):
        raise OptionError(f"{path} has other contents; choose another file")
    differing = sorted(k for k in {*stored, *head} if stored.get(k) != head.get(k))
    if differing:
        raise OptionError(
            f"{path} was made with "
            + ", ".join(f"{k}={stored.get(k)!r} (now {head.get(k)!r})" for k in differing)
            + "; choose another file or the same settings"
        )


def resume_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `complete_lines` of an interrupted run and prepare the file for appending.

    A missing or empty file gets `head` as its first line. An incomplete last line is removed.
    """
    lines = complete_lines(path, head)
    size = len(_complete_part(path))
    if not size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    elif size < path.stat().st_size:
        os.truncate(path, size)
    return lines


def _complete_part(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
