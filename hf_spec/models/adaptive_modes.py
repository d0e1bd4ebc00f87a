"""What is trained of adaptive tokens; see `hf_spec.models.adaptive_tokens` for what they mean."""

from __future__ import annotations

MODES = ("gated", "embeddings", "lora", "full")
