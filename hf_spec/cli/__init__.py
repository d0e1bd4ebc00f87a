"""Command line `hf-spec`: `app` lists the sub-commands."""

from hf_spec.cli.main import main

__all__ = ["main"]
