"""Families of published heads; importing this module makes them known."""

from hf_spec.heads import block_reading, eagle_head, feature_heads, gemma_assistant, mtp_head

__all__ = ["block_reading", "eagle_head", "feature_heads", "gemma_assistant", "mtp_head"]
