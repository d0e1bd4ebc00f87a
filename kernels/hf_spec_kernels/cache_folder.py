"""Cache folder of this user, and checks of who may write to it."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

VARIABLE = "HF_SPEC_CACHE"
DEFAULT = "~/.cache/hf_spec"


def user_id() -> int | None:
    """Return the effective user id; None on Windows."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def cache_folder(name: str = "") -> Path:
    """Return the folder `name` of the cache; it may not exist yet.

    The cache is the folder that the variable `HF_SPEC_CACHE` names, else `~/.cache/hf_spec`. A
    user without a home folder, or with one that cannot be written, gets a private folder of the
    system's temporary files.

    Raises:
        PermissionError: if that temporary folder belongs to another user.
    """
    named = os.environ.get(VARIABLE)
    # Without a home folder this returns the name unchanged; pathlib would raise RuntimeError.
    root = os.path.expanduser(named or DEFAULT)
    if not root.startswith("~") and (named or _is_usable(Path(root) / name)):
        return Path(root) / name
    user = user_id()
    fallback = Path(tempfile.gettempdir()) / ("hf_spec" if user is None else f"hf_spec-{user}")
    make_private(fallback)
    return fallback / name


def _is_usable(folder: Path) -> bool:
    if folder.exists():
        return True
    nearest = next(parent for parent in folder.parents if parent.exists())
    return os.access(nearest, os.W_OK | os.X_OK)


def make_private(folder: Path) -> None:
    """Create a folder that only this user can access, or `check_private` an existing one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)


def check_private(path: Path) -> None:
    """Raise `PermissionError` for a file or folder that another user may have written."""
    user = user_id()
    if user is None:
        return
    status = path.stat()
    remedy = f"set {VARIABLE} to a folder of your own"
    if status.st_uid != user:
        raise PermissionError(
            f"{path} belongs to the user {status.st_uid}, not to {user}; {remedy}"
        )
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            f"{path} can be written by other users; delete it, run chmod go-w on it, or {remedy}"
        )
