"""Families of published heads; importing this module makes them known."""

from hf_spec.methods.block import layouts as block_reading
from hf_spec.methods.eagle import head as eagle_head
from hf_spec.methods.gemma_assistant import head as gemma_assistant
from hf_spec.methods.medusa import heads as feature_heads
from hf_spec.methods.mtp import head as mtp_head

__all__ = ["block_reading", "eagle_head", "feature_heads", "gemma_assistant", "mtp_head"]
