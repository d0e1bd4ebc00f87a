"""How to install this package, and which version it is, said in one place.

It is on no package index yet. There its name could be anybody's, so no text of ours asks pip for
it by name: pip is given the folder of a checkout.
"""

from __future__ import annotations

VERSION = "0.2.0"
WHERE = "in the folder of a checkout of hf-spec"


def install_command(extra: str = "") -> str:
    """The command that installs the package with an extra of setup.cfg, to be run `WHERE`."""
    return f'pip install ".[{extra}]"' if extra else "pip install ."


def how_to_install(extra: str = "") -> str:
    """The command and where to run it, as the end of a sentence."""
    return f"run {install_command(extra)} {WHERE}"
