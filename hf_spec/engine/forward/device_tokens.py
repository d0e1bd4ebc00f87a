"""What a device knows of a forward that its host has queued without looking."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceTokens:
    """What only the device knows of the nodes of a forward.

    Attributes:
        tokens: (M,) int64, in the order of the nodes.
        sees: (M, bytes) uint8 as `RaggedLayout.bits`, the nodes of its row that each descends from,
            and itself, the root left out; None where the tree says so.
    """

    tokens: Tensor
    sees: Tensor | None = None

    def to(self, device: torch.device) -> DeviceTokens:
        """The same on another device."""
        return DeviceTokens(
            self.tokens.to(device), None if self.sees is None else self.sees.to(device)
        )
