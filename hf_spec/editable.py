"""How `pip install -e` shows this checkout to Python; of no use to anything else.

setuptools would install an import hook, because the packages lie in two folders, and a hook is
nothing that a type checker or an editor can read. Folders in a `.pth` file are. The checkout itself
is not one of them: with it `kernels` and `tests` could be imported everywhere, and libraries that
look for Hugging Face's package `kernels` would find ours. `setup.cfg` names the command; nothing
imports it at run time.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools.command import editable_wheel

# Holds nothing but a link to the package.
LINKS = Path("build", "editable")


class EditableWheel(editable_wheel.editable_wheel):
    """The command of setuptools, with the parent folders of both packages on the path."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        root = Path(self.project_dir)
        links = root / LINKS
        # A copy of a checkout may hold copies of what was linked.
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir(parents=True)
        target = Path(*[".."] * len(LINKS.parts), "hf_spec")
        try:
            (links / "hf_spec").symlink_to(target, target_is_directory=True)
            # Not of setuptools' public names: a later release may lack it.
            static_pth = editable_wheel._StaticPth
        except (AttributeError, OSError):
            # Links need a privilege on Windows. Python reads the hook, if tools do not.
            return super()._select_strategy(name, tag, build_lib)
        return static_pth(self.distribution, name, [links, root / "kernels"])
