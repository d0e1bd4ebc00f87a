"""Adapter methods; importing this module makes them known."""

from hf_spec.models import adaptive_tokens, disco_classifier, falcon_head, trained_draft

__all__ = ["adaptive_tokens", "disco_classifier", "falcon_head", "trained_draft"]
