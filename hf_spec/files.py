"""Files and folders that a reader meets whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hf_spec.errors import OptionError


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Let a file or folder appear under its name in one rename, once all of it is there.

    Args:
        path: its name; what lies there is replaced. One writer at a time.

    Yields:
        A free name beside it to write to. If the body raises, what was written there is removed and
        what lies at `path` stays.
    """
    part = path.with_name(f"{path.name}.part")
    # A process that was killed leaves its part.
    _remove(part)
    try:
        yield part
        # A file is replaced by the rename itself; a folder would refuse.
        if path.is_dir():
            _remove(path)
        part.replace(path)
    finally:
        _remove(part)


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; another one is an `OptionError`."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no text in UTF-8 ({error}); save it as that") from error


def write_json(path: Path, content: Any, **settings: Any) -> None:
    """Write JSON, whole or not at all; `settings` are those of `json.dumps`."""
    with written_whole(path) as part:
        part.write_text(json.dumps(content, **{"indent": 1, **settings}), encoding="utf-8")


def check_new_folder(folder: Path) -> None:
    """Refuse a folder to be written that there is something in; `OptionError`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} is there already; name a folder that is new or empty")


def whole_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The JSON lines after the first of a file that a run appends to, and may be writing to now.

    The first line is `head`, by which the run is known; a file that is missing has no lines. A last
    line that is not whole is left out.

    Raises:
        OptionError: if the file begins with another head.
    """
    content = _whole(path)
    if not content:
        # A run that was killed leaves the beginning of its head, anything else is not ours.
        begun = path.read_bytes() if path.exists() else b""
        if not json.dumps(head).encode().startswith(begun):
            raise OptionError(f"{path} holds something else; choose another file")
        return []
    try:
        found, *lines = map(json.loads, content.splitlines())
    except ValueError as error:
        raise OptionError(f"{path} holds something else; choose another file") from error
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds something else; choose another file")
    if found != head:
        differing = sorted(k for k in {*found, *head} if found.get(k) != head.get(k))
        raise OptionError(
            f"{path} was made with "
            + ", ".join(f"{k}={found.get(k)!r} (now {head.get(k)!r})" for k in differing)
            + "; choose another file or the same settings"
        )
    return lines


def resume_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The same, and make the file ready to be appended to after a run that may have been killed.

    A file that is missing or empty begins with `head`. A line that was cut off is removed.
    """
    lines = whole_lines(path, head)
    size = len(_whole(path))
    if not size:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(head) + "\n", encoding="utf-8")
    elif size < path.stat().st_size:
        os.truncate(path, size)
    return lines


def _whole(path: Path) -> bytes:
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
