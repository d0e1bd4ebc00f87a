"""The head of a draft model cut out of its target: a learned bridge, and few tokens.

The target's head expects what the target's last layer says. After an early layer a square matrix,
the *bridge*, learns to translate (a "tuned lens", Belrose et al. 2023, arXiv 2303.08112).

On a small model most of a draft step goes into the head: 49,152 rows of SmolLM2's against a few
layers. Frequent tokens are nearly all of a text, so a head of a few thousand rows proposes almost
the same and is much faster; the target still chooses among all tokens (as in FR-Spec, Zhao et al.
2025, arXiv 2502.14856).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.fast.graph_shapes import step_variant


class _Alone(threading.local):
    """The heads that give this thread the logits of their own tokens alone."""

    heads: tuple[nn.Module, ...] = ()


_alone = _Alone()


class FewTokensHead(nn.Module):
    """The target's head for the tokens of `vocabulary`; every other one gets the logit -inf.

    Args:
        head: (V, hidden size) head of the target. Shared without a vocabulary, else its rows are
            copied.
        vocabulary: (R,) int64 token ids, ascending; None for all.

    Attributes:
        full_size, size: V; and R, or V.
    """

    vocabulary: Tensor | None

    def __init__(self, head: Any, vocabulary: Tensor | None):
        super().__init__()
        self.full_size, width = head.weight.shape
        self.size = self.full_size
        self.scores = head
        if vocabulary is not None:
            weight = weight_rows(head, vocabulary)
            vocabulary = vocabulary.to(weight.device)
            self.size = len(vocabulary)
            bias = getattr(head, "bias", None)
            self.scores = nn.Linear(
                width, self.size, bias=bias is not None, device=weight.device, dtype=weight.dtype
            )
            self.scores.requires_grad_(False).weight.copy_(weight)
            if bias is not None:
                self.scores.bias.copy_(bias.detach()[vocabulary])
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def known(self, hidden: Tensor) -> Tensor:
        """(..., hidden size) -> (..., R), the logits of the vocabulary alone."""
        return self.scores(hidden)

    def tokens(self, places: Tensor) -> Tensor:
        """Token ids of places in the vocabulary."""
        return places if self.vocabulary is None else self.vocabulary[places]

    def places(self) -> Tensor:
        """(V,) int64 where each token stands in the vocabulary, -1 for those outside."""
        if self.vocabulary is None:
            return torch.arange(self.full_size)
        places = torch.full((self.full_size,), -1)
        places[self.vocabulary.cpu()] = torch.arange(self.size)
        return places

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Let this thread's forwards of the whole model end in the (..., R) of `known`."""
        before, _alone.heads = _alone.heads, (*_alone.heads, self)
        try:
            with step_variant(id(self)):
                yield
        finally:
            _alone.heads = before

    def forward(self, hidden: Tensor) -> Tensor:
        """(..., hidden size) -> (..., V)."""
        few = self.known(hidden)
        return few if any(head is self for head in _alone.heads) else self.among_all(few)

    def among_all(self, few: Tensor) -> Tensor:
        """(..., R) logits of the vocabulary -> (..., V)."""
        if self.vocabulary is None:
            return few
        logits = few.new_full((*few.shape[:-1], self.full_size), float("-inf"))
        logits[..., self.vocabulary] = few
        return logits


class DraftHead(FewTokensHead):
    """A `FewTokensHead` after a (hidden size, hidden size) bridge, the identity at first."""

    def __init__(self, head: Any, vocabulary: Tensor | None):
        super().__init__(head, vocabulary)
        weight: Tensor = head.weight.detach()
        size = weight.shape[1]
        self.bridge: Any = nn.Linear(
            size, size, bias=False, device=weight.device, dtype=weight.dtype
        )
        nn.init.eye_(self.bridge.weight)

    def known(self, hidden: Tensor) -> Tensor:
        """(..., hidden size) -> (..., R), the logits of the vocabulary alone."""
        return super().known(self.bridge(hidden))


def check_plain_head(model: PreTrainedModel) -> None:
    """Refuse a target whose logits are not simply what its head says of its features."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedError(
                f"{type(model).__name__} has {name}={getattr(config, name)}: its logits are not "
                "the head's output, which this training needs"
            )
