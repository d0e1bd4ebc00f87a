"""The contract of virtual tokens: nodes of a draft tree that ask the target and propose nothing.

Such a node has a negative token id. It takes a place in the tree like any other, so its position
and what it attends to come for free, and no other node sees it but those below it. What it is to
the model, an embedding and perhaps more, is the business of whoever sends it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel


class VirtualTokens(Protocol):
    """What virtual nodes stand for in a model's forward."""

    def active(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Make `model` ready for forwards with virtual tokens; as it was found afterwards."""

    @property
    def acts_on_layers(self) -> bool:
        """Whether layers compute something else for virtual tokens, which `acting` is for."""

    def embed(self, model: PreTrainedModel, token_ids: Tensor) -> Tensor:
        """(B, T, hidden size) `inputs_embeds` of (B, T) ids on the device of the embeddings.

        Those of the model itself but where an id is negative. It asks the device nothing.
        """

    def acting(self, token_ids: Tensor) -> AbstractContextManager[None]:
        """Hold for one forward of an active model what layers need to know of (B, T) host ids."""
