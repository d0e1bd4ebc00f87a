"""The errors users meet.

Each is a `ValueError`, raised before the first forward pass, and its message names the value it
refuses and the way out.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class SpecError(ValueError):
    """Base of every error that hf_spec raises on purpose."""


class OptionError(SpecError):
    """An unknown strategy or option, or an option whose value cannot be used."""


class AssistantError(SpecError):
    """The assistant is missing, of the wrong kind, or does not fit the target model."""


class HubError(AssistantError):
    """The Hugging Face Hub cannot be reached, or refuses; the same call may work later."""


class UnsupportedError(SpecError):
    """A model, input or generation setting that no strategy can serve exactly."""


def choices(given: object, known: Iterable[str]) -> str:
    """The end of an error about a name that nobody knows: what was meant, and what there is.

    Args:
        given: what the caller wrote, which need not be text.
        known: the names there are.
    """
    names = list(known)
    near = difflib.get_close_matches(given, names, n=1) if isinstance(given, str) else []
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}known: {', '.join(names)}"
