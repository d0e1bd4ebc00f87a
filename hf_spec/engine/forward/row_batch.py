"""What each row of a ragged batch contributes to a forward, and what may be padded.

`BATCHING` names EMS-SD and what it is compared with: its two halves alone, and neither (Ni et al.
2024, arXiv 2405.07542, section 3). Tokens, positions and what each token sees are the same in all.

==================  ===========================  ==============================================
`batching`          inputs of the linear layers  storage of keys and values
==================  ===========================  ==============================================
`unpadded`          the tokens alone             each row goes on after its own last token
`unpadded_kv`       B rows of equal length       likewise
`unpadded_input`    the tokens alone             all rows go on at one place; rows that
                                                 accepted less have gaps before it
`padded`            B rows of equal length       likewise (the paper's vanilla method)
==================  ===========================  ==============================================

In padded inputs a row that has ended stays until the last one ends, as in any (B, T) batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import DraftTree


@dataclass(frozen=True)
class Batching:
    """Whether linear layers' inputs and storage places are padded to the largest row of a step."""

    pads_inputs: bool = False
    pads_kv: bool = False


BATCHING = {
    "unpadded": Batching(),
    "unpadded_kv": Batching(pads_inputs=True),
    "unpadded_input": Batching(pads_kv=True),
    "padded": Batching(pads_inputs=True, pads_kv=True),
}


@dataclass
class RowWork:
    """What one row contributes to a forward: pending tokens (root excluded), then tree nodes.

    Attributes:
        row: the sequence, and its slot in the pool.
        stored: committed tokens whose keys and values are in the pool.
        pending: committed tokens that are not, without the root.
        nodes: tree nodes to run.
        offsets: the same, counted from the row's root.
        width: places from the root on that the row's nodes use, those of earlier forwards included.
        start: storage place of the first pending token, or of the root; None right after `stored`
            tokens without gaps.
        held: where there are gaps, the storage places of the stored tokens.
        fill: padding that runs after the nodes: copies of the root that nobody looks at.
        position_offset: added to every position that the model is told.
    """

    row: int
    stored: int
    pending: list[int]
    nodes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    width: int = 0
    start: int | None = None
    held: Sequence[int] | None = None
    fill: int = 0
    position_offset: int = 0

    @property
    def base(self) -> int:
        """Position of the root."""
        return self.stored + len(self.pending)

    @property
    def root_place(self) -> int:
        """Storage place of the root."""
        return (self.stored if self.start is None else self.start) + len(self.pending)

    @property
    def num_tokens(self) -> int:
        """Tokens to run, without padding."""
        return len(self.pending) + len(self.nodes)

    @property
    def num_keys(self) -> int:
        """Storage places in use once the tokens have run, gaps included."""
        return self.root_place + self.width

    @property
    def places(self) -> list[int]:
        """Storage place of every token and of the padding, in the order they run."""
        root, keys = self.root_place, self.num_keys
        pending = range(root - len(self.pending), root)
        nodes = [root + offset for offset in self.offsets]
        return [*pending, *nodes, *range(keys, keys + self.fill)]

    def shape(self, tree: DraftTree) -> object:
        """Equal for rows that look at equal places; gaps are a row's own."""
        if self.held is not None:
            return self.row
        start = tree.row_start[self.row]
        parents = [parent - start for parent in tree.parent[start + 1 : start + self.width]]
        counts = self.stored, len(self.pending), self.root_place, self.fill
        return counts, self.width, tuple(self.offsets), tuple(parents)

    def tokens(self, tree: DraftTree) -> list[int]:
        """Every token and the padding, in the order they run."""
        tokens = tree.tokens
        # A row without nodes has no root here; 0 is a token of every model.
        copied = tokens[self.nodes[0]] if self.nodes else 0
        return [*self.pending, *(tokens[node] for node in self.nodes), *[copied] * self.fill]

    def positions(self, tree: DraftTree) -> list[int]:
        """The true position of every token, and the root's for the padding."""
        base, depth = self.base, tree.depth
        nodes = [base + depth[node] for node in self.nodes]
        return [*range(self.stored, base), *nodes, *[base] * self.fill]

    def told(self, positions: list[int]) -> list[int]:
        """Positions as the model is told them."""
        offset = self.position_offset
        return [position + offset for position in positions] if offset else positions

    def key_positions(self) -> Tensor:
        """(root_place,) int64, the position of the token at each place, -1 for a gap."""
        if self.held is None:
            return torch.arange(self.base)
        positions = torch.full((self.root_place,), -1)
        positions[torch.tensor(self.held, dtype=torch.long)] = torch.arange(self.stored)
        first = self.root_place - len(self.pending)
        positions[first:] = torch.arange(self.stored, self.base)
        return positions

    def node_depths(self, tree: DraftTree) -> list[int]:
        """Depth of the row's first `width` nodes, by offset."""
        start = tree.row_start[self.row]
        return tree.depth[start : start + self.width]

    def visible_nodes(self, tree: DraftTree) -> Tensor:
        """(nodes, width) bool: which of the row's nodes each node to run descends from."""
        return tree.ancestor_mask[span(self.nodes), : self.width]


def fill_up(work: Sequence[RowWork], idle: Sequence[RowWork]) -> list[RowWork]:
    """Pad rows with something to run, and idle ones, which are all padding, to the longest one."""
    length = max(w.num_tokens for w in work)
    rows = sorted([*work, *idle], key=lambda w: w.row)
    for w in rows:
        w.fill = length - w.num_tokens
    return rows


def span(places: Sequence[int]) -> slice | Tensor:
    """Indices as a slice wherever they are consecutive, which avoids a gather."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places)
