"""The adapter methods and the published heads of this library; importing it makes them known."""

from hf_spec.models import (
    adaptive_tokens,
    disco_classifier,
    falcon_head,
    gemma_assistant,
    trained_draft,
)

__all__ = [
    "adaptive_tokens",
    "disco_classifier",
    "falcon_head",
    "gemma_assistant",
    "trained_draft",
]
