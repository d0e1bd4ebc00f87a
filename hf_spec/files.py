"""Files and folders that a reader meets whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


def write_json(path: Path, content: Any, **settings: Any) -> None:
    """Write JSON, whole or not at all; `settings` are those of `json.dumps`."""
    with written_whole(path) as part:
        part.write_text(json.dumps(content, **{"indent": 1, **settings}), encoding="utf-8")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
