"""How `pip install -e` shows this checkout to Python; of no use to anything else.

setuptools would install an import hook, because the packages lie in two folders, and a hook is
nothing that a type checker or an editor can read. Both folders in a `.pth` file are. `setup.cfg`
names the command; nothing imports it at run time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from setuptools.command import editable_wheel


class EditableWheel(editable_wheel.editable_wheel):
    """The command of setuptools, with the folders of both packages on the path."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        root = Path(self.project_dir)
        folders = [root, root / "kernels"]
        return editable_wheel._StaticPth(self.distribution, name, folders)
