"""Heads of drafters: output heads for few tokens, after a norm or a learned bridge; pair heads.

The output head of a small model takes most of a draft step: 49,152 rows of SmolLM2's against a few
layers. Frequent tokens make up nearly all of a text, so a head of a few thousand rows proposes
almost the same and is much faster; the target still chooses among all tokens (as in FR-Spec, Zhao
et al. 2025, arXiv 2502.14856).

A draft model that is cut out of its target ends in an early layer, but the target's head expects
the output of the last one. A square matrix, the *bridge*, learns to map one to the other (a "tuned
lens", Belrose et al. 2023, arXiv 2303.08112).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_spec.backend.device.placement import weight_rows
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.fast.graph_shapes import step_variant

# Hidden and cell state of both layers of a Falcon head's LSTM, (2, S, H) each.
State = tuple[Tensor, Tensor]


class _Restricted(threading.local):
    """The heads that return the logits of their vocabulary only, in this thread."""

    heads: tuple[nn.Module, ...] = ()


_restricted = _Restricted()


class FewTokensHead(nn.Module):
    """The target's output head for the tokens of `vocabulary`; all others get the logit -inf.

    The (V, hidden size) head is shared without a vocabulary; else its rows are copied. `vocabulary`
    are (R,) int64 token ids, ascending. `full_size` is V, `size` R, or V without a vocabulary.
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
            has_bias = getattr(head, "bias", None) is not None
            self.scores = nn.Linear(
                width, self.size, bias=has_bias, device=weight.device, dtype=weight.dtype
            )
            self.scores.requires_grad_(False)
            self._copy(weight, head, vocabulary)
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def read_rows(self, head: Any) -> None:
        """Copy the rows of `head`, the target's output head, again; a shared one stays."""
        if self.vocabulary is not None:
            self._copy(weight_rows(head, self.vocabulary), head, self.vocabulary)

    @torch.no_grad()
    def _copy(self, weight: Tensor, head: Any, vocabulary: Tensor) -> None:
        self.scores.weight.copy_(weight)
        if self.scores.bias is not None:
            self.scores.bias.copy_(head.bias.detach()[vocabulary])

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """Return (..., R) logits of the vocabulary of (..., hidden size)."""
        return self.scores(hidden)

    def tokens(self, indices: Tensor) -> Tensor:
        """Return the token ids of indices in the draft vocabulary."""
        return indices if self.vocabulary is None else self.vocabulary[indices]

    def indices(self) -> Tensor:
        """Return (V,) int64 indices of all tokens in the draft vocabulary, -1 for those outside."""
        if self.vocabulary is None:
            return torch.arange(self.full_size)
        indices = torch.full((self.full_size,), -1)
        indices[self.vocabulary.cpu()] = torch.arange(self.size)
        return indices

    @contextmanager
    def restrict_logits(self) -> Iterator[None]:
        """Let this thread's forward passes of the model return `draft_logits`, (..., R)."""
        before, _restricted.heads = _restricted.heads, (*_restricted.heads, self)
        try:
            with step_variant(id(self)):
                yield
        finally:
            _restricted.heads = before

    def forward(self, hidden: Tensor) -> Tensor:
        """Return (..., V) logits of (..., hidden size)."""
        logits = self.draft_logits(hidden)
        restricted = any(head is self for head in _restricted.heads)
        return logits if restricted else self.over_vocabulary(logits)

    def over_vocabulary(self, draft_logits: Tensor) -> Tensor:
        """Return (..., V) logits of (..., R) logits of the vocabulary."""
        if self.vocabulary is None:
            return draft_logits
        logits = draft_logits.new_full((*draft_logits.shape[:-1], self.full_size), float("-inf"))
        logits[..., self.vocabulary] = draft_logits
        return logits


class DraftHead(FewTokensHead):
    """A `FewTokensHead` after a (hidden size, hidden size) bridge, initially the identity."""

    def __init__(self, head: Any, vocabulary: Tensor | None):
        super().__init__(head, vocabulary)
        weight: Tensor = head.weight.detach()
        size = weight.shape[1]
        self.bridge: Any = nn.Linear(
            size, size, bias=False, device=weight.device, dtype=weight.dtype
        )
        nn.init.eye_(self.bridge.weight)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """See `FewTokensHead`."""
        return super().draft_logits(self.bridge(hidden))


class NormedHead(FewTokensHead):
    """A norm and an output projection, both shared modules, over R of the target's V tokens."""

    def __init__(self, norm: Any, scores: Any, vocabulary: Tensor | None, full_size: int):
        nn.Module.__init__(self)
        self.norm = norm
        self.scores = scores
        self.full_size = full_size
        self.size = scores.weight.shape[0]
        self.register_buffer("vocabulary", vocabulary, persistent=False)

    def draft_logits(self, hidden: Tensor) -> Tensor:
        """(..., h) -> (..., R) logits of the tokens in `vocabulary`."""
        normed = self.norm(hidden)
        return self.scores(normed.to(self.scores.weight.dtype))


@dataclass(frozen=True)
class SinglePairShape:
    """Shape of EAGLE and MTP heads: blocks of one pair, no state carried between pairs."""

    num_layers: int = 1
    block_size: int = 1
    recurrent: bool = False


class PairHead(nn.Module):
    """A head that predicts features from pairs of a token and a feature.

    Attributes:
        hidden_layers: indices of the target's `hidden_states` that a feature is made of.
        hidden_size: H, the width of its features.
        shape: `SinglePairShape`, or a `FalconShape` with blocks of k pairs.
        head: `FewTokensHead` that reads logits off the features it predicts.
        attention: the model that has its layers.
        mask_pair: token id and (1, H) feature that stand for a token to come, after the newest true
            pair; None if a draft takes several passes.
        recorder: keeps the texts that it drafts for, see `RolloutRecorder`; None to keep none.
    """

    hidden_layers: tuple[int, ...] = (-1,)
    hidden_size: int
    shape: Any = SinglePairShape()
    head: Any
    attention: Any
    mask_pair: tuple[int, Tensor] | None = None
    recorder: Any = None

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Return the (T, H) features of the (T, ...) states of `hidden_layers`."""
        raise NotImplementedError

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix (S, L) int64 t_{i+1} and (S, L, H) features; return (S, L, M) and the state."""
        raise NotImplementedError

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """Let (B, T, M) mixed pairs see each other; return (B, T, H) predicted features.

        `attention` has `attention_mask`, `position_ids` and `spec_step`, as layers take them.
        """
        raise NotImplementedError


def check_plain_head(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` if the target scales or caps the output of its head."""
    config = model.config.get_text_config()
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise UnsupportedError(
                f"{type(model).__name__} has {name}={getattr(config, name)}: its logits are not "
                "the head's output, which this training needs"
            )
