"""The `hf-spec` command and its sub-commands."""

from hf_spec.cli.main import main

__all__ = ["main"]
