"""Fused operations for speculative decoding, one folder each, beside their torch references."""
