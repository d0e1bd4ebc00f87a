"""Neural parts: draft models, and the heads and adapters of the trained methods.

Importing it makes the adapter methods known.
"""

from hf_spec.models import adaptive_tokens, disco_classifier, falcon_head, trained_draft

__all__ = ["adaptive_tokens", "disco_classifier", "falcon_head", "trained_draft"]
