"""Adapter methods; importing this module makes them known."""

from hf_spec.methods.disco import classifier as disco_classifier
from hf_spec.methods.draft_model import trained as trained_draft
from hf_spec.methods.falcon import head as falcon_head
from hf_spec.methods.sdsat import adaptive_tokens

__all__ = ["adaptive_tokens", "disco_classifier", "falcon_head", "trained_draft"]
