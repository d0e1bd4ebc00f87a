"""The true pairs of sequences: what a head that reads the target's features has to be fed with.

A *pair* i is a feature that the target gave at position i with the token t_{i+1} that follows it.
A round adds those of the root and of every accepted node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import send
from hf_spec.engine.forward.draft_tree import Verdict
from hf_spec.engine.forward.output import ForwardOutput

# Hidden and cell state of both layers of a Falcon head's LSTM, (2, S, H) each.
State = tuple[Tensor, Tensor]


class StateReader(Protocol):
    """A head that says which states of the target its features are made of.

    Attributes:
        hidden_layers: indices into the target's `hidden_states`.
    """

    hidden_layers: tuple[int, ...]

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        """Features (T, H) of the (T, ...) states of `hidden_layers`."""


@dataclass
class PairRow:
    """The true pairs of one sequence.

    Attributes:
        slot: of the pool.
        features: (n, H), those of the newest pairs.
        first: position of the first pair, above 0 where a text began in a reused cache.
        num_pairs: how many have a known feature, `stored` of them keys and values.
        covered: how many the LSTM's kept state has seen.
        state: that state, (2, 1, H) each; None at the start, and where nothing is carried.
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
        """The features of pairs [begin, end)."""
        offset = self.num_pairs - len(self.features)
        return self.features[begin - offset : end - offset]


def extend_all(rows: Sequence[PairRow], features: Sequence[Tensor]) -> None:
    """Add (n, H) features of the pairs that follow to each row, in one operation for all."""
    pairs = list(zip(rows, features, strict=True))
    if any(row.num_pairs and len(row.features) for row in rows):
        parts = [[row.features, new] if row.num_pairs else [new] for row, new in pairs]
        joined = torch.cat([part for mine in parts for part in mine])
        features = joined.split([sum(map(len, mine)) for mine in parts])
    for (row, new), mine in zip(pairs, features, strict=True):
        row.features = mine
        row.num_pairs += len(new)


class PairRows:
    """The true pairs of every row of a generation, whose features have a width and a device.

    Attributes:
        rows: of each its pairs.
        roots: of each the position of the root of its newest draft, to be noted by who drafts.
        device: the features'.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device):
        self.device = device
        self._empty = torch.zeros(0, width, device=device)
        self.rows = [self._none(row) for row in range(num_rows)]
        self.roots = [0] * num_rows

    def restart(self, row: int) -> None:
        """A new sequence, without pairs."""
        self.rows[row] = self._none(row)

    def learn(self, verdict: Verdict, output: ForwardOutput, head: StateReader) -> None:
        """Add the features of every root and of what was accepted, as `head` makes them."""
        kept = output.kept_places(verdict)
        for row in kept:
            if self.rows[row].first < 0:
                self.rows[row].first = self.roots[row] - len(output.pending.get(row, []))
        places = torch.tensor([place for mine in kept.values() for place in mine])
        # Layers of one target may be on several devices.
        sent: dict[torch.device, Tensor] = {}

        def choose(states: Tensor) -> Tensor:
            if states.device not in sent:
                (sent[states.device],) = send([places], states.device)
            return states[sent[states.device]]

        features = head.fuse([choose(output.hidden[layer]) for layer in head.hidden_layers])
        features = features.to(self._empty.device)
        parts = features.split([len(mine) for mine in kept.values()])
        extend_all([self.rows[row] for row in kept], parts)

    def _none(self, row: int) -> PairRow:
        return PairRow(row, self._empty, -1)
