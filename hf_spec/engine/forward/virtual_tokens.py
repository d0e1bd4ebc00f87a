"""Protocol of virtual tokens: nodes of a draft tree that the target runs and that propose nothing.

Such a node has a negative token id. Its position and its mask are those of any node; only its
descendants attend to it. Its embedding, and what layers compute for it, are defined by the drafter
that adds it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

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

    def acting(self, token_ids: Tensor) -> AbstractContextManager[None]:
        """Run one forward pass of an active model on these (B, T) host ids."""
