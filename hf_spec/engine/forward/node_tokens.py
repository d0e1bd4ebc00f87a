"""Draft nodes whose tokens are not ids on the host.

*Virtual tokens* are nodes with a negative token id: the target runs them, but they propose nothing.
Their position and their mask are those of any node; only their descendants attend to them. Their
embedding, and what layers compute for them, are defined by the drafter that adds them.

*Device tokens* were chosen on the device, and are not copied to the host before they run.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel


class VirtualTokens(Protocol):
    """Meaning of virtual nodes in a model's forward pass."""

    def active(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Prepare `model` for virtual tokens; restore it when the block ends."""

    @property
    def acts_on_layers(self) -> bool:
        """True if layers treat virtual tokens differently, inside `acting`."""

    def embed(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """Return (B, T, hidden size) `inputs_embeds` of (B, T) ids on the embeddings' device.

        Ids from 0 on get the model's own embeddings. Does not synchronize with the device.
        """

    def acting(self, token_ids: Tensor) -> AbstractContextManager[Tensor]:
        """Run one forward pass of an active model on these (B, T) host ids.

        Yields (B * T,) bool on the host, True for tokens that layers treat differently; they may do
        so by a `LowRankChange` only.
        """


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
        sees = None if self.sees is None else self.sees.to(device)
        return DeviceTokens(self.tokens.to(device), sees)
