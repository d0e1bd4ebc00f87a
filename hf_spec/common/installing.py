"""Version of this package, its installation command, and detection of the `hf-spec` command.

The package is not on a package index, where the name could belong to anyone.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

VERSION = "0.2.0"
WHERE = "in the folder of a checkout of hf-spec"
# Names of the script of the entry point `hf-spec`.
SCRIPTS = {"hf-spec", "hf-spec.exe"}


def install_command(extra: str = "") -> str:
    """Return the command that installs the package with an extra of setup.cfg, to run `WHERE`."""
    return f'pip install ".[{extra}]"' if extra else "pip install ."


def how_to_install(extra: str = "") -> str:
    """Return the command and its folder as the end of a sentence."""
    return f"run {install_command(extra)} {WHERE}"


def started_as_command() -> bool:
    """Return True if this process was started as `hf-spec` or `python -m hf_spec`."""
    # An embedded interpreter may have no arguments.
    program = sys.argv[0] if sys.argv else ""
    by_name = Path(program).name in SCRIPTS
    # While Python searches the module of -m, argv[0] is "-m".
    by_module = program == "-m" and ("-m", "hf_spec") in pairwise(sys.orig_argv)
    return by_name or by_module
