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

    def embedded(self, model: PreTrainedModel, token_ids: Tensor) -> AbstractContextManager[Tensor]:
        """Hold for one forward of an active model what the virtual tokens among its inputs need.

        For (B, T) ids, negative where a token is virtual, it yields (B, T, hidden size)
        `inputs_embeds`, the model's own for all other tokens.
        """
