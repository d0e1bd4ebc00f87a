"""Adapter methods and families of published heads; importing this module makes them known."""

from hf_spec.models import (
    adaptive_tokens,
    disco_classifier,
    eagle_head,
    falcon_head,
    gemma_assistant,
    mtp_head,
    trained_draft,
)

__all__ = [
    "adaptive_tokens",
    "disco_classifier",
    "eagle_head",
    "falcon_head",
    "gemma_assistant",
    "mtp_head",
    "trained_draft",
]
