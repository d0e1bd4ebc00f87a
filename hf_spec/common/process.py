"""What this process was started as."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

# Names of the script that an installation makes of the entry point `hf-spec`.
SCRIPTS = {"hf-spec", "hf-spec.exe"}


def started_as_command() -> bool:
    """Whether this process was started as `hf-spec` or as `python -m hf_spec`."""
    # An interpreter inside another program may have no arguments at all.
    program = sys.argv[0] if sys.argv else ""
    by_name = Path(program).name in SCRIPTS
    # While Python looks for the module that -m names, it is called "-m" itself.
    by_module = program == "-m" and ("-m", "hf_spec") in pairwise(sys.orig_argv)
    return by_name or by_module
