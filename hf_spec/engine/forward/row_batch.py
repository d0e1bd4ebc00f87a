"""Tokens that each row of a ragged batch contributes to one forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.engine.forward.attention_span import Segment, span
from hf_spec.engine.forward.draft_tree import DraftTree


@dataclass
class RowWork:
    """Tokens of one row in a forward pass: pending tokens (without the root), then tree nodes.

    Each row continues right after its own stored tokens, so the index of a committed token in its
    slot is its position.

    Attributes:
        row: the sequence, and its slot in the pool.
        stored: number of committed tokens whose keys and values are in the pool.
        pending: committed tokens that are not stored, without the root.
        nodes: tree nodes to run.
        offsets: the same nodes, counted from the row's root.
        width: slot entries from the root on that the row's nodes use, those of earlier forward
            passes of the round included.
        position_offset: added to every position that is passed to the model.
    """

    row: int
    stored: int
    pending: list[int]
    nodes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    width: int = 0
    position_offset: int = 0

    @property
    def root_position(self) -> int:
        """Position of the root."""
        return self.stored + len(self.pending)

    @property
    def root_index(self) -> int:
        """Index of the root in the slot."""
        return self.root_position

    @property
    def num_tokens(self) -> int:
        """Number of tokens to run, without padding."""
        return len(self.pending) + len(self.nodes)

    @property
    def num_keys(self) -> int:
        """Number of slot entries in use once the tokens have run."""
        return self.root_index + self.width

    @property
    def cache_indices(self) -> list[int]:
        """Index in the slot of every token, in the order they run."""
        root = self.root_index
        pending = range(root - len(self.pending), root)
        return [*pending, *[root + offset for offset in self.offsets]]

    def shape_key(self, tree: DraftTree) -> object:
        """Return a key that is equal for rows whose segments differ in slot and start only."""
        start = tree.row_start[self.row]
        parents = [parent - start for parent in tree.parent[start + 1 : start + self.width]]
        return self.stored, len(self.pending), self.width, tuple(self.offsets), tuple(parents)

    def tokens(self, tree: DraftTree) -> list[int]:
        """Return the token ids in the order they run."""
        tokens = tree.tokens
        return [*self.pending, *[tokens[node] for node in self.nodes]]

    def positions(self, tree: DraftTree) -> list[int]:
        """Return the position of every token."""
        root, depth = self.root_position, tree.depth
        return [*range(self.stored, root), *[root + depth[node] for node in self.nodes]]

    def position_ids(self, positions: list[int]) -> list[int]:
        """Return the position ids to pass to the model, e.g. shifted after an image."""
        offset = self.position_offset
        return [position + offset for position in positions] if offset else positions

    def key_positions(self) -> Tensor:
        """Return (root_index,) int64, the position of the token at each index before the root."""
        return torch.arange(self.root_position)

    def node_depths(self, tree: DraftTree) -> list[int]:
        """Return the depth of the row's first `width` nodes."""
        start = tree.row_start[self.row]
        return tree.depth[start : start + self.width]

    def visible_nodes(self, tree: DraftTree) -> Tensor:
        """Return (nodes, width) bool, True where a node to run descends from a node of the row."""
        return tree.ancestor_mask[span(self.nodes), : self.width]

    def segments(self, tree: DraftTree, start: int = 0) -> list[Segment]:
        """Return the row's segments, whose tokens begin at `start` in the packed sequence."""
        segments = [self._chain_segment(start)] if self.pending else []
        if self.nodes:
            segments.append(self._tree_segment(tree, start + len(self.pending)))
        return segments

    def _chain_segment(self, start: int) -> Segment:
        """Pending tokens attend to all stored tokens, the pending ones before them and themselves.

        Every pending token attends to the first one, which therefore belongs to the prefix.
        """
        count, positions = len(self.pending), torch.arange(self.stored, self.root_position)
        return Segment(
            slot=self.row,
            start=start,
            end=start + count,
            num_keys=self.root_index,
            position=positions,
            last_position=self.root_position - 1,
            tail_position=positions[1:],
            seen=None if count == 1 else torch.ones(count, count, dtype=torch.bool).tril()[:, 1:],
            prefix=self.stored + 1,
            cache_indices=range(self.root_index - count, self.root_index),
            is_chain=True,
        )

    def _tree_segment(self, tree: DraftTree, start: int) -> Segment:
        """Nodes attend to all committed tokens, their ancestors and themselves.

        Every node attends to the root, which therefore belongs to the prefix.
        """
        root, root_index, count = self.root_position, self.root_index, len(self.nodes)
        depths = [tree.depth[node] for node in self.nodes]
        positions = key_positions = torch.tensor([root + d for d in self.node_depths(tree)])
        if count < self.width:
            positions = torch.tensor([root + depth for depth in depths])
        return Segment(
            slot=self.row,
            start=start,
            end=start + count,
            num_keys=root_index + self.width,
            position=positions,
            last_position=root + max(depths),
            tail_position=key_positions[1:],
            seen=self.visible_nodes(tree)[:, 1:] if self.width > 1 else None,
            prefix=root + 1,
            cache_indices=[root_index + offset for offset in self.offsets],
        )

    def query_segment(self, start: int, count: int) -> Segment:
        """Return a segment of `count` queries at the row's next position, which are not stored.

        They attend to everything that is stored; the row itself has nothing to run.
        """
        return Segment(
            slot=self.row,
            start=start,
            end=start + count,
            num_keys=self.root_index,
            position=torch.full((count,), self.root_position),
            last_position=self.root_position,
            tail_position=torch.zeros(0, dtype=torch.long),
            seen=None,
            prefix=self.stored,
        )
