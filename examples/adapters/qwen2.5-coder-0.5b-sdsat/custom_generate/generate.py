"""Generates with this adapter: custom_generate=<its repository>, trust_remote_code=True.

Needs the package hf-spec (see requirements.txt), which does the work.
"""

from hf_spec import custom_generate as generate

__all__ = ["generate"]
