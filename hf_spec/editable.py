"""Build command for `pip install -e`, named in `setup.cfg`; nothing imports it at run time.

The packages are in two folders, so setuptools would install an import hook, which type checkers and
editors do not read. They read folders in a `.pth` file. The checkout itself must not be one of
them: it would make `kernels` and `tests` importable, and libraries that use Hugging Face's package
`kernels` would import ours.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from setuptools.command import editable_wheel

# Folder that contains only a link to the package.
LINKS = Path("build", "editable")


class EditableWheel(editable_wheel.editable_wheel):
    """Command of setuptools with the parent folders of both packages on the path."""

    def _select_strategy(self, name: str, tag: str, build_lib: Any) -> Any:
        root = Path(self.project_dir)
        links = root / LINKS
        # In a copied checkout the link may have become a folder.
        shutil.rmtree(links, ignore_errors=True)
        links.mkdir(parents=True)
        target = Path(*[".."] * len(LINKS.parts), "hf_spec")
        try:
            (links / "hf_spec").symlink_to(target, target_is_directory=True)
            # A private name of setuptools, which a later release may lack.
            static_pth = editable_wheel._StaticPth
        except (AttributeError, OSError):
            # On Windows links need a privilege. The hook still works for Python.
            return super()._select_strategy(name, tag, build_lib)
        return static_pth(self.distribution, name, [links, root / "kernels"])
