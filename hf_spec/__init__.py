"""Lossless speculative decoding for Hugging Face models.

Importing this package adds the arguments `spec_strategy=` and `assistant=` to `model.generate()`
and `model.generate_batch()`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hf_spec.common.installing import VERSION, started_as_command

__version__ = VERSION

if TYPE_CHECKING or not started_as_command():
    # `public` exports these too, but in a way that type checkers do not follow.
    from hf_spec.methods.builtin import *  # noqa: F403
    from hf_spec.public import *  # noqa: F403 - its `__all__` is the list of names
    from hf_spec.public import __all__  # noqa: F401
else:
    # `hf-spec --help` must not import torch, so the command imports these names on demand.
    def __getattr__(name: str) -> Any:
        return getattr(importlib.import_module("hf_spec.public"), name)
