"""References of the linear layers with 4-bit weights, and the row-major storage of bitsandbytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

# Codes of this many outputs by two inputs lie together in the interleaved layout.
OUTPUTS = 32


@dataclass(frozen=True)
class NestedScales:
    """Scales in 8 bits (double quantization).

    Attributes:
        codes: (S,) uint8.
        table: (256,) float32, the values of the codes.
        absmax: (ceil(S / 256),) float32, the scale of every 256 codes.
        offset: () float32, added to all scales.
    """

    BLOCK: ClassVar = 256

    codes: Tensor
    table: Tensor
    absmax: Tensor
    offset: Tensor

    def dequantized(self) -> Tensor:
        """Return the (S,) scales in float32."""
        factors = self.absmax.repeat_interleave(self.BLOCK)[: len(self.codes)]
        return self.table[self.codes.long()] * factors + self.offset


@dataclass(frozen=True)
class RowMajorWeight:
    """An (N, K) weight in the storage of bitsandbytes, contiguous, in blocks of b inputs.

    Attributes:
        codes: (N, K / 2) uint8; the first input of a byte has the high half.
        scales: (N * K / b,) float32.
        table: (16,) float32, the values of the codes.
        block_size: b.
        dtype: float32 or bfloat16, to which products of a value and a scale are rounded.
    """

    codes: Tensor
    scales: Tensor | NestedScales
    table: Tensor
    block_size: int
    dtype: torch.dtype

    def dequantized(self) -> Tensor:
        """Return the weight in its dtype."""
        scales = self.scales
        wide = scales.dequantized() if isinstance(scales, NestedScales) else scales
        both = torch.stack([self.codes >> 4, self.codes & 15], -1)
        values = self.table[both.view(-1, self.block_size).long()] * wide[:, None]
        return values.view(len(self.codes), -1).to(self.dtype)


def row_major_four_bit_linear(states: Tensor, weight: RowMajorWeight) -> Tensor:
    """Compute the linear layer in float32."""
    return states @ weight.dequantized().float().T


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
