"""What may be chosen when a part is trained; known without torch, so that help can list it."""

from __future__ import annotations

# Of Falcon's glancing training, see `hf_spec.training.csgd`.
CSGD = {
    "schedule": ("paper", "released", "off"),
    "noise": ("paper", "released", "off"),
    "hard_label": ("token", "gumbel"),
    "replaced_token": ("teacher", "data"),
    "feature_scale": ("raw", "dimension"),
}

# Of SDSAT, see `hf_spec.models.adaptive_tokens`, `hf_spec.training.sdsat_student` and
# `hf_spec.training.windows`.
MODES = ("gated", "embeddings", "lora", "full")
LAYOUTS = ("branches", "replaced")
LOSSES = ("improved", "basic")
START_SHARE = 0.1
