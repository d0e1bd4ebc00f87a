"""Generate with this adapter: custom_generate=<its repository>, trust_remote_code=True.

Requires the package hf-spec (see requirements.txt).
"""

from hf_spec import custom_generate as generate

__all__ = ["generate"]
