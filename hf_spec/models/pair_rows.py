"""The true pairs of sequences: what a head that reads the target's features has to be fed with.

A *pair* i is a feature that the target gave at position i with the token t_{i+1} that follows it.
A round adds those of the root and of every accepted node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.devices.transfer import send
from hf_spec.execution.runner import ForwardOutput
from hf_spec.execution.tree import Verdict

# Hidden and cell state of both layers of a Falcon head's LSTM, (2, S, H) each.
State = tuple[Tensor, Tensor]
Choose = Callable[[Tensor], Tensor]


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
        self.features = torch.cat([self.features, features]) if self.num_pairs else features
        self.num_pairs += len(features)

    def slice(self, begin: int, end: int) -> Tensor:
        """The features of pairs [begin, end)."""
        offset = self.num_pairs - len(self.features)
        return self.features[begin - offset : end - offset]


class PairRows:
    """The true pairs of every row of a generation, whose features have a width and a device.

    Attributes:
        rows: of each its pairs.
        roots: of each the position of the root of its newest draft, to be noted by who drafts.
    """

    def __init__(self, num_rows: int, width: int, device: torch.device):
        self._empty = torch.zeros(0, width, device=device)
        self.rows = [self._none(row) for row in range(num_rows)]
        self.roots = [0] * num_rows

    def restart(self, row: int) -> None:
        """A new sequence, without pairs."""
        self.rows[row] = self._none(row)

    def learn(
        self, verdict: Verdict, output: ForwardOutput, read: Callable[[Choose], Tensor]
    ) -> None:
        """Add the features of every root and of what was accepted.

        They are what `read` makes, (n, H), of a function that chooses their states among (T, ...)
        states of all tokens that were run.
        """
        tree = verdict.tree
        places: list[int] = []
        counts: dict[int, int] = {}
        for row, accepted in enumerate(verdict.accepted):
            if not tree.nodes(row):
                continue
            pending = output.pending.get(row, [])
            if self.rows[row].first < 0:
                self.rows[row].first = self.roots[row] - len(pending)
            nodes = [output.nodes[node] for node in (tree.row_start[row], *accepted)]
            places += [*pending, *nodes]
            counts[row] = len(pending) + len(nodes)

        def choose(states: Tensor) -> Tensor:
            (index,) = send([torch.tensor(places)], states.device)
            return states[index]

        features = read(choose).to(self._empty.device)
        for row, mine in zip(counts, features.split(list(counts.values())), strict=True):
            self.rows[row].extend(mine)

    def _none(self, row: int) -> PairRow:
        return PairRow(row, self._empty, -1)
