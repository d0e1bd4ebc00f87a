"""Entry point of the `hf-spec` command.

Help, completion and errors about names must not import torch or transformers. So `import hf_spec`
does not import them in the process of the command.
"""

from __future__ import annotations

import importlib.util
import sys

from hf_spec.common.installing import how_to_install

NEEDED_PACKAGES = ("rich", "typer", "yaml")


def main() -> None:
    """Run the command line and exit with the status of the sub-command."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"hf-spec needs {' and '.join(missing)}, which the cli extra installs: "
            f"{how_to_install('cli')}"
        )
    from hf_spec.cli.app import build_app

    build_app()(prog_name="hf-spec")
