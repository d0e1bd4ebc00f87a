"""Model inputs for the new tokens of a ragged batch: one packed sequence, or a rectangle.

Packed, (1, T): the tokens of all rows one after the other, for models that take an attention
function; nothing is padded. Rectangular, (B, T): one line per row, aligned on the right and padded
on the left, with a 4D mask; for the other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.decoding.attention import Segment
from hf_spec.decoding.tree import DraftTree


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
    """

    row: int
    stored: int
    pending: list[int]
    nodes: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    width: int = 0

    @property
    def base(self) -> int:
        """Storage place and position of the root."""
        return self.stored + len(self.pending)

    @property
    def num_tokens(self) -> int:
        """Tokens to run."""
        return len(self.pending) + len(self.nodes)

    @property
    def num_keys(self) -> int:
        """Storage places in use once the tokens have run."""
        return self.base + self.width

    @property
    def places(self) -> list[int]:
        """Storage place of every token, in the order they run."""
        return [*range(self.stored, self.base), *(self.base + offset for offset in self.offsets)]

    def tokens(self, tree: DraftTree) -> list[int]:
        """Every token, in the order they run."""
        return [*self.pending, *(tree.host.tokens[node] for node in self.nodes)]

    def positions(self, tree: DraftTree) -> list[int]:
        """The true position of every token."""
        depths = (tree.host.depth[node] for node in self.nodes)
        return [*range(self.stored, self.base), *(self.base + depth for depth in depths)]

    def node_depths(self, tree: DraftTree) -> list[int]:
        """Depth of the row's first `width` nodes, by offset."""
        start = tree.host.row_start[self.row]
        return tree.host.depth[start : start + self.width]

    def visible_nodes(self, tree: DraftTree) -> Tensor:
        """(nodes, width) bool: which of the row's nodes each node to run descends from."""
        return tree.ancestor_mask[_span(self.nodes), : self.width]


@dataclass
class PackedInputs:
    """All tokens in one sequence.

    Attributes:
        tokens, positions: T of each, rows one after the other.
        writes: per row (slot, start, end, places), as `PackedStep` takes them.
        segments: what each stretch of tokens attends to.
        pending: per row where its pending tokens are among the T.
        nodes: where the tree nodes are among the T, in tree order.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    writes: list[tuple[int, int, int, slice | Tensor]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    pending: dict[int, range] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)


@dataclass
class RectangularInputs:
    """One line of T columns per row, on the host.

    Attributes:
        tokens, positions: (B, T) int64; padding holds zeros.
        places: (B, T) int64, storage place of each token.
        visible: (B, T, S) bool, what each token attends to.
        key_positions: (B, S) int64, the true position of each key.
        pending, nodes: as in `PackedInputs`, counted over B * T.
    """

    tokens: Tensor
    positions: Tensor
    places: Tensor
    visible: Tensor
    key_positions: Tensor
    pending: dict[int, range] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)


def pack(work: Sequence[RowWork], tree: DraftTree) -> PackedInputs:
    """Lay the tokens of all rows one after the other."""
    inputs = PackedInputs()
    for w in work:
        start = len(inputs.tokens)
        begin = start + len(w.pending)
        inputs.tokens += w.tokens(tree)
        inputs.positions += w.positions(tree)
        inputs.pending[w.row] = range(start, begin)
        inputs.nodes += range(begin, len(inputs.tokens))
        if w.pending:
            inputs.segments.append(_chain_segment(w, start))
        if w.nodes:
            inputs.segments.append(_tree_segment(w, begin, inputs.positions[begin:], tree))
        inputs.writes.append((w.row, start, len(inputs.tokens), _span(w.places)))
    return inputs


def align_right(
    work: Sequence[RowWork], tree: DraftTree, num_rows: int, spare_place: int
) -> RectangularInputs:
    """Lay the tokens of each row at the right end of a line.

    Args:
        work: rows with something to run.
        tree: the draft tree.
        num_rows: B; rows without work get a line of padding.
        spare_place: storage place for padding, which no token ever looks at.
    """
    length = max(w.num_tokens for w in work)
    num_keys = max(w.num_keys for w in work)
    inputs = RectangularInputs(
        tokens=torch.zeros(num_rows, length, dtype=torch.long),
        positions=torch.zeros(num_rows, length, dtype=torch.long),
        places=torch.full((num_rows, length), spare_place),
        visible=torch.zeros(num_rows, length, num_keys, dtype=torch.bool),
        key_positions=torch.arange(num_keys).repeat(num_rows, 1),
    )
    # Padding looks at the first key only, so that its softmax stays finite; nobody reads it.
    inputs.visible[:, :, 0] = True
    for w in work:
        first = length - w.num_tokens
        begin = first + len(w.pending)
        depths = torch.tensor(w.node_depths(tree), dtype=torch.long)
        inputs.tokens[w.row, first:] = torch.tensor(w.tokens(tree))
        inputs.positions[w.row, first:] = torch.tensor(w.positions(tree))
        inputs.places[w.row, first:] = torch.tensor(w.places)
        chain = torch.arange(w.stored, w.base)
        inputs.visible[w.row, first:begin] = torch.arange(num_keys) <= chain[:, None]
        if w.nodes:
            inputs.visible[w.row, begin:, : w.base] = True
            inputs.visible[w.row, begin:, w.base : w.num_keys] = w.visible_nodes(tree).cpu()
            inputs.key_positions[w.row, w.base : w.num_keys] = w.base + depths
        line = w.row * length
        inputs.pending[w.row] = range(line + first, line + begin)
        inputs.nodes += range(line + begin, line + length)
    return inputs


def _span(places: Sequence[int]) -> slice | Tensor:
    """Indices as a slice wherever they are consecutive, which avoids a gather."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places)


def _chain_segment(work: RowWork, start: int) -> Segment:
    """Pending tokens see everything before them, and themselves."""
    position = torch.arange(work.stored, work.base)
    key_position = torch.arange(work.base)
    return Segment(
        slot=work.row,
        start=start,
        end=start + len(work.pending),
        num_keys=work.base,
        position=position,
        last_position=work.base - 1,
        key_position=key_position,
        visible=key_position <= position[:, None] if len(work.pending) > 1 else None,
        prefix=work.stored + 1,
    )


def _tree_segment(work: RowWork, start: int, positions: list[int], tree: DraftTree) -> Segment:
    """Nodes see all committed tokens, their ancestors and themselves."""
    depths = work.node_depths(tree)
    position = torch.tensor(positions)
    key_position = torch.tensor([*range(work.base), *(work.base + depth for depth in depths)])
    visible = None
    if work.width > 1:
        below = work.visible_nodes(tree)
        visible = below.new_ones(len(work.nodes), work.num_keys)
        visible[:, work.base :] = below
        position, key_position = position.to(below.device), key_position.to(below.device)
    return Segment(
        slot=work.row,
        start=start,
        end=start + len(work.nodes),
        num_keys=work.num_keys,
        position=position,
        last_position=max(positions),
        key_position=key_position,
        visible=visible,
        prefix=work.base + 1,
    )
