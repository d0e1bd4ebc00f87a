"""Reference of the linear layer with 4-bit weights."""

from __future__ import annotations

import torch
from torch import Tensor

# Codes of this many outputs by two inputs lie together.
OUTPUTS = 32


def dequantized(codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Return the (N, K) weight in float32, in which every product of two bfloat16 is exact."""
    num_outputs, pairs = codes.shape
    halves = codes.view(-1, OUTPUTS)
    both = torch.cat([halves & 15, halves >> 4], 1).view(-1, pairs, OUTPUTS, 2)
    values = table.float()[both.transpose(1, 2).reshape(num_outputs, 2 * pairs).long()]
    blocks = values.view(num_outputs, len(scales), -1)
    return (blocks * scales.float().T[:, :, None]).view(num_outputs, -1)


def four_bit_linear(states: Tensor, codes: Tensor, scales: Tensor, table: Tensor) -> Tensor:
    """Compute the linear layer with sums in float32, rounded once."""
    return (states.float() @ dequantized(codes, scales, table).T).to(states.dtype)
