"""The true pairs of sequences, which a head that reads the target's features runs.

A *pair* i is the target's feature of position i and the token t_{i+1} that follows it. A round adds
the pairs of the root and of every accepted node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput

# Hidden and cell state of both layers of a Falcon head's LSTM, (2, S, H) each.
State = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class MaskTokens:
    """Pairs that stand for tokens to come, after the newest true pair of every row.

    Attributes:
        token: token id of each.
        features: (M, H) feature of each.
    """

    token: int
    features: Tensor


class PairHead(Protocol):
    """A head that predicts features from pairs of a token and a feature.

    Attributes:
        hidden_layers: indices of the target's `hidden_states` that a feature is made of.
        hidden_size: H, the width of its features.
        head: `FewTokensHead` that reads logits off the features it predicts.
        attention: the model that has its layers; each takes an attention function.
    """

    hidden_layers: tuple[int, ...]
    hidden_size: int
    head: Any
    attention: Any

    @property
    def shape(self) -> Any:
        """The pairs per block (`block_size`), `num_layers`, and True if `recurrent`."""

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Return the (T, H) features of the (T, ...) states of `hidden_layers`."""

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """Mix (S, L) int64 t_{i+1} and (S, L, H) features; return (S, L, M) and the state."""

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """Let (B, T, M) mixed pairs see each other; return (B, T, H) predicted features.

        `attention` has `attention_mask`, `position_ids` and `spec_step`, as layers take them.
        """

    def mask_tokens(self, count: int) -> MaskTokens | None:
        """Return what stands for `count` tokens to come; None if a draft takes several passes."""


@dataclass
class PairRow:
    """The true pairs of one sequence.

    Attributes:
        slot: its slot in the KV pool.
        features: (n, H), those of the newest pairs.
        first: position of the first pair, above 0 after a reused cache.
        num_pairs: number of pairs with a feature.
        stored: number of these with stored keys and values.
        covered: number of pairs that `state` has seen.
        state: the LSTM's state, (2, 1, H) each; None at the start and without an LSTM state.
    """

    slot: int
    features: Tensor
    first: int
    num_pairs: int = 0
    stored: int = 0
    covered: int = 0
    state: State | None = None

    def extend(self, features: Tensor) -> None:
        """Add (n, H) features of the pairs that follow."""
        extend_all([self], [features])

    def slice(self, begin: int, end: int) -> Tensor:
        """Return the features of pairs [begin, end)."""
        offset = self.num_pairs - len(self.features)
        return self.features[begin - offset : end - offset]


def extend_all(rows: Sequence[PairRow], features: Sequence[Tensor]) -> None:
    """Add (n, H) features of the pairs that follow to each row, in one operation for all."""
    pairs = list(zip(rows, features, strict=True))
    if any(row.num_pairs and len(row.features) for row in rows):
        parts = [[row.features, new] if row.num_pairs else [new] for row, new in pairs]
        joined = torch.cat([part for row_parts in parts for part in row_parts])
        features = joined.split([sum(map(len, row_parts)) for row_parts in parts])
    for (row, new), extended in zip(pairs, features, strict=True):
        row.features = extended
        row.num_pairs += len(new)


class PairRows:
    """The true pairs of every row of a generation.

    Args:
        num_rows: number of rows.
        width: H of their features.
        device: device of their features.

    Attributes:
        rows: per row its pairs.
        root_positions: per row the position of the root of its newest draft, set by the drafter.
        device: device of the features.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device):
        self.device = device
        self._no_features = torch.zeros(0, width, device=device)
        self.rows = [self._empty_row(row) for row in range(num_rows)]
        self.root_positions = [0] * num_rows

    def restart(self, row: int) -> None:
        """Begin a new sequence, without pairs."""
        self.rows[row] = self._empty_row(row)

    def learn(self, verdict: Verdict, output: ForwardOutput, head: PairHead) -> None:
        """Add the features of every root and of the accepted nodes, as `head` makes them."""
        kept_places = output.committed_indices(verdict)
        for row in kept_places:
            if self.rows[row].first < 0:
                pending = len(output.pending.get(row, []))
                self.rows[row].first = self.root_positions[row] - pending
        places = torch.tensor([place for row in kept_places.values() for place in row])
        # Layers of one target may be on several devices.
        sent: dict[torch.device, Tensor] = {}

        def choose(states: Tensor) -> Tensor:
            if states.device not in sent:
                (sent[states.device],) = send([places], states.device)
            return states[sent[states.device]]

        features = head.fuse([choose(output.hidden[layer]) for layer in head.hidden_layers])
        features = features.to(self.device)
        parts = features.split([len(row) for row in kept_places.values()])
        extend_all([self.rows[row] for row in kept_places], parts)

    def _empty_row(self, row: int) -> PairRow:
        return PairRow(row, self._no_features, -1)
