"""The `hf-spec` command: what is needed before one of its sub-commands is chosen.

Nothing here, and nothing that help, completion and the answer to a wrong name need, imports torch
or transformers. `import hf_spec` does, except in the process of the command.
"""

from __future__ import annotations

import importlib.util
import sys
from itertools import pairwise
from pathlib import Path

from hf_spec.installing import how_to_install

NEEDED_PACKAGES = ("rich", "typer", "yaml")

# Names of the script that an installation makes of the entry point `hf-spec`.
SCRIPTS = {"hf-spec", "hf-spec.exe"}


def started_as_command() -> bool:
    """Whether this process was started as `hf-spec` or as `python -m hf_spec`."""
    by_name = Path(sys.argv[0]).name in SCRIPTS
    # While Python looks for the module that -m names, it is called "-m" itself.
    by_module = sys.argv[0] == "-m" and ("-m", "hf_spec") in pairwise(sys.orig_argv)
    return by_name or by_module


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
