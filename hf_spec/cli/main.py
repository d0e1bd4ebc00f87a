"""The `hf-spec` command: what is needed before one of its sub-commands is chosen.

Nothing here, and nothing that help, completion and the answer to a wrong name need, imports torch
or transformers. `import hf_spec` does, except in the process of the command.
"""

from __future__ import annotations

import importlib.util
import sys

from hf_spec.common.installing import how_to_install

NEEDED_PACKAGES = ("rich", "typer", "yaml")


def main() -> None:
    """Run the command line; exits with the status of the chosen sub-command."""
    missing = [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(
            f"hf-spec needs {' and '.join(missing)}, which the cli extra installs: "
            f"{how_to_install('cli')}"
        )
    from hf_spec.cli.app import build_app

    build_app()(prog_name="hf-spec")
