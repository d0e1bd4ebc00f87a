"""Files and folders that a reader meets whole or not at all."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
    # A process that was killed leaves its part behind.
    _remove(part)
    try:
        yield part
        # A file is replaced by the rename itself; a folder would refuse.
        if path.is_dir():
            _remove(path)
        part.replace(path)
    finally:
        _remove(part)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
