"""Errors for users, raised before the first forward pass.

The message names the rejected value and an alternative.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """Base class of all errors of hf_spec."""


class OptionError(SpecError):
    """Unknown strategy or option, or invalid value of an option."""


class AssistantError(SpecError):
    """Assistant that is missing, of the wrong kind, or does not fit the target model."""


class HubError(AssistantError):
    """Unreachable or failing Hugging Face Hub; a retry may succeed."""


class UnsupportedError(SpecError):
    """Model, input or generation setting that is not supported losslessly."""


def choices(name: object, valid: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a suggestion and the `valid` names."""
    names = list(valid)
    near = difflib.get_close_matches(name, names, n=1) if isinstance(name, str) else []
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}known: {', '.join(names)}"
