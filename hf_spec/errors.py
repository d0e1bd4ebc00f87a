"""The errors users meet.

Each is a `ValueError`, raised before the first forward pass, and its message names the value it
refuses and the way out.
"""


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
