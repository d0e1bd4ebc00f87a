"""Copies of tensors on another device, with the same strides."""

from __future__ import annotations

import torch
from torch import Tensor


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy with the same strides; `Tensor.to` closes gaps."""
    shape, strides = tensor.shape, tensor.stride()
    return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device).copy_(tensor)
