"""Draft tokens that were chosen on the device and not copied to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DeviceTokens:
    """Token ids and visibility bits of the nodes of a forward pass, on the device.

    Attributes:
        tokens: (M,) int64 token ids, in the order of the nodes.
        sees: (M, bytes) uint8 like `RaggedLayout.bits`: ancestors of each node in its row, itself
            included, without the root; None if the tree defines them.
    """

    tokens: Tensor
    sees: Tensor | None = None

    def to(self, device: torch.device) -> DeviceTokens:
        """Copy to another device."""
        return DeviceTokens(
            self.tokens.to(device), None if self.sees is None else self.sees.to(device)
        )
