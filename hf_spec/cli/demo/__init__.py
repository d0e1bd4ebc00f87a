"""`hf-spec demo`: a small real model answers four prompts plainly and speculatively."""

from hf_spec.cli.demo.command import demo

__all__ = ["demo"]
