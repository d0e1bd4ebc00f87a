"""The precision that trainings compute in."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from hf_spec.common.machine import has_bfloat16

HALF = (torch.bfloat16, torch.float16)


def mixed_precision(model: PreTrainedModel) -> torch.autocast:
    """Products in bfloat16, but for a float32 model on a CPU that has no instruction for them.

    There each product is emulated, which took four to eleven times as long as float32.
    """
    # Weights of one dtype and states of another need autocast to bring them together.
    enabled = model.device.type != "cpu" or model.dtype in HALF or has_bfloat16()
    return torch.autocast(model.device.type, torch.bfloat16, enabled=enabled)
