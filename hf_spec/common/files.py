"""Files and folders that a reader meets whole or not at all."""

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


def check_regular(path: Path) -> None:
    """Reject a device, a pipe or a folder, which may block forever or never end.

    Raises:
        OptionError: if `path` exists and is not a regular file.
    """
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
        raise OptionError(f"{path} is {kind}; name a regular file")


def read_text(path: Path) -> str:
    r"""Return the text of a UTF-8 file without its byte order mark, lines ended by "\\n".

    Raises:
        OptionError: if it is not a regular file, or not UTF-8.
    """
    check_regular(path)
    try:
        # Not in text mode, which takes a lone "\r" for the end of a line.
        return path.read_bytes().decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        raise OptionError(f"{path} is no text in UTF-8 ({error}); save it as that") from error


def parse_json(text: str | bytes, where: str) -> Any:
    """Parse JSON from a file that may be damaged or hostile.

    Args:
        text: the JSON.
        where: the file and line number, for the message.

    Raises:
        OptionError: if it is not JSON, or nested too deeply to be parsed.
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise OptionError(f"{where}: nested too deeply to be read; leave the line out") from error
    except ValueError as error:
        raise OptionError(f"{where}: no JSON, {error}; leave the line out") from error


def parse_json_lines(text: str, source: object) -> Iterator[tuple[int, Any]]:
    r"""Yield the number, from 1, and the value of every JSON line that is not blank.

    Only "\n" ends a line: JSON strings may hold other line separators, such as U+2028.

    Raises:
        OptionError: if a line is not JSON; the message names `source` and the line.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, parse_json(line, f"{source}, line {number}")


def write_json(path: Path, content: Any, **settings: Any) -> None:
    """Write JSON, whole or not at all; `settings` are those of `json.dumps`.

    Raises:
        OptionError: if `path` is a device or another file that is not to be replaced.
    """
    check_regular(path)
    with written_whole(path) as part:
        part.write_text(json.dumps(content, **{"indent": 1, **settings}), encoding="utf-8")


def check_new_folder(folder: Path) -> None:
    """Refuse a folder to be written that there is something in; `OptionError`."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise OptionError(f"{folder} is there already; name a folder that is new or empty")


def whole_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the JSON lines after the first of a file that a run appends to, perhaps right now.

    The first line is `head`, which identifies the run. A missing file has no lines. An incomplete
    last line is left out.

    Raises:
        OptionError: if the file begins with another head, or a line is not a JSON object.
    """
    check_regular(path)
    content = _whole(path)
    if not content:
        # A run that was killed leaves the beginning of its head, anything else is not ours.
        begun = path.read_bytes() if path.exists() else b""
        if not json.dumps(head).encode().startswith(begun):
            raise OptionError(f"{path} holds something else; choose another file")
        return []
    first, *others = content.removesuffix(b"\n").split(b"\n")
    try:
        found = json.loads(first)
    except (ValueError, RecursionError) as error:
        raise OptionError(f"{path} holds something else; choose another file") from error
    check_head(path, found, head)
    lines = []
    for number, line in enumerate(others, start=2):
        value = parse_json(line, where := f"{path}, line {number}")
        if not isinstance(value, dict):
            raise OptionError(f"{where}: not an object; leave the line out")
        lines.append(value)
    return lines


def check_head(path: Path, found: Any, head: Mapping[str, Any]) -> None:
    """Reject a file that another run made, by the facts that identify a run.

    Raises:
        OptionError: if `found`, which the file holds, is not `head`; the message names the values
            that differ.
    """
    if not isinstance(found, dict):
        raise OptionError(f"{path} holds something else; choose another file")
    differing = sorted(k for k in {*found, *head} if found.get(k) != head.get(k))
    if differing:
        raise OptionError(
            f"{path} was made with "
            + ", ".join(f"{k}={found.get(k)!r} (now {head.get(k)!r})" for k in differing)
            + "; choose another file or the same settings"
        )


def resume_lines(path: Path, head: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return `whole_lines`, and prepare the file to be appended to after an interrupted run.

    A missing or empty file is started with `head`. An incomplete last line is removed.
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
