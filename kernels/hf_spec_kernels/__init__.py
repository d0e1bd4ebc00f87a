"""Fused operations for speculative decoding, one folder an operation, each beside its plain torch reference."""
