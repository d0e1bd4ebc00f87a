"""Command line `hf-spec`: `app` lists the sub-commands, one module each."""

from hf_spec.cli.main import main

__all__ = ["main"]
