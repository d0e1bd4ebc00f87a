"""Precision of training computations."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_spec.common.machine import has_bfloat16

HALF = (torch.bfloat16, torch.float16)


def mixed_precision(model: PreTrainedModel) -> torch.autocast:
    """Return autocast to bfloat16, disabled for float32 models on CPUs without bfloat16.

    Those CPUs emulate bfloat16 matmuls, which is several times slower than float32.
    """
    # Half-precision models need autocast to combine weights and states of different dtypes.
    enabled = model.device.type != "cpu" or model.dtype in HALF or has_bfloat16()
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)
