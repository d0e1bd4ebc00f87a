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
from torch.nn import functional as F

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.row_batch import RowWork, span


@dataclass
class PackedInputs:
    """All tokens in one sequence.

    Attributes:
        tokens: T of them, rows one after the other.
        positions: T of them, as the model is told; segments count tokens.
        writes: per row (slot, start, end, places), as `PackedStep` takes them.
        segments: what each stretch of tokens attends to.
        pending: per row where its pending tokens are among the T.
        nodes: where the tree nodes are among the T, in tree order.
        fill: where among the T there is padding to be taken for nodes, so that all rows have
            equally many.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    writes: list[tuple[int, int, int, slice | Tensor]] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    pending: dict[int, range] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    fill: list[int] = field(default_factory=list)

    def places(self, paddings: Sequence[int]) -> list[int]:
        """Where each token stands among those of its row and the padding before them."""
        return [
            position + paddings[segment.slot]
            for segment in self.segments
            for position in segment.position.tolist()
        ]


@dataclass
class RectangularInputs:
    """One line of T columns per row, on the host.

    Attributes:
        tokens, positions: (B, T) int64, positions as the model is told; padding holds zeros.
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
    most_nodes = max(len(w.nodes) for w in work)
    views: dict[object, _View] = {}
    for w in work:
        shape = w.shape(tree)
        if shape not in views:
            views[shape] = _view(w, tree)
        view = views[shape]
        start = len(inputs.tokens)
        begin = start + len(w.pending)
        after = begin + len(w.nodes)
        inputs.tokens += w.tokens(tree)
        inputs.positions += w.told(view.positions)
        inputs.pending[w.row] = range(start, begin)
        inputs.nodes += range(begin, after)
        inputs.fill += range(after, after + min(w.fill, most_nodes - len(w.nodes)))
        inputs.segments += [one.moved(w.row, start + one.start) for one in view.segments]
        inputs.writes.append((w.row, start, len(inputs.tokens), view.places))
    return inputs


@dataclass(frozen=True)
class _View:
    """What rows of equal shape have in common; segments are counted from the row's first token."""

    positions: list[int]
    places: slice | Tensor
    segments: list[Segment]


def _view(work: RowWork, tree: DraftTree) -> _View:
    positions, segments = work.positions(tree), []
    begin = len(work.pending)
    if work.pending:
        segments.append(_chain_segment(work, 0))
    if work.nodes:
        segments.append(_tree_segment(work, begin, positions[begin:], tree))
    elif work.fill:
        segments.append(_fill_segment(work, begin))
    return _View(positions, span(work.places), segments)


def align_right(
    work: Sequence[RowWork], tree: DraftTree, num_rows: int, spare_place: int
) -> RectangularInputs:
    """Lay the tokens of each row at the right end of a line.

    Rows without work get a line of padding, which is stored at `spare_place`, where no token looks.
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
        before, root = w.key_positions(), w.root_place
        depths = torch.tensor(w.node_depths(tree), dtype=torch.long)
        inputs.tokens[w.row, first:] = torch.tensor(w.tokens(tree))
        inputs.positions[w.row, first:] = torch.tensor(w.told(w.positions(tree)))
        inputs.places[w.row, first:] = torch.tensor(w.places)
        inputs.visible[w.row, first:] = False
        inputs.visible[w.row, first:begin, :root] = _up_to(before, w)
        # What stands in a gap is never looked at, but a bias of it must be finite.
        inputs.key_positions[w.row, :root] = before.clamp(min=0)
        if w.nodes:
            inputs.visible[w.row, begin:, :root] = before >= 0
            inputs.visible[w.row, begin:, root : w.num_keys] = w.visible_nodes(tree)
            inputs.key_positions[w.row, root : w.num_keys] = w.base + depths
        line = w.row * length
        inputs.pending[w.row] = range(line + first, line + begin)
        inputs.nodes += range(line + begin, line + length)
    return inputs


def _up_to(key_positions: Tensor, work: RowWork) -> Tensor:
    """(pending, keys) bool: pending tokens see everything before them, and themselves."""
    positions = torch.arange(work.stored, work.base)
    return (key_positions >= 0) & (key_positions <= positions[:, None])


def _chain_segment(work: RowWork, start: int) -> Segment:
    """Pending tokens see all that is stored, those before them and themselves."""
    count, positions = len(work.pending), torch.arange(work.stored, work.base)
    if work.held is None:
        # The first of them is seen by all.
        prefix, tail = work.stored + 1, positions[1:]
        seen = None if count == 1 else torch.ones(count, count, dtype=torch.bool).tril()[:, 1:]
    else:
        prefix, tail = 0, work.key_positions()
        seen = _up_to(tail, work)
    return Segment(
        slot=work.row,
        start=start,
        end=start + count,
        num_keys=work.root_place,
        position=positions,
        last_position=work.base - 1,
        tail_position=tail,
        seen=seen,
        prefix=prefix,
        first_position=_first(tail, prefix),
    )


def _tree_segment(work: RowWork, start: int, positions: list[int], tree: DraftTree) -> Segment:
    """Nodes see all committed tokens, their ancestors and themselves; padding sees as the root."""
    depths = torch.tensor(work.node_depths(tree), dtype=torch.long)
    tail = work.base + depths
    seen = None
    if work.width > 1 or work.held is not None:
        seen = work.visible_nodes(tree)
        if work.fill:
            seen = F.pad(seen, (0, 0, 0, work.fill))
            seen[len(work.nodes) :, 0] = True
    if work.held is None:
        # Everybody sees the root.
        prefix, tail = work.base + 1, tail[1:]
        seen = None if seen is None else seen[:, 1:]
    else:
        before = work.key_positions()
        prefix, tail = 0, torch.cat([before, tail])
        assert seen is not None, "gaps are hidden"
        seen = torch.cat([(before >= 0).expand(len(positions), -1), seen], dim=1)
    return Segment(
        slot=work.row,
        start=start,
        end=start + len(positions),
        num_keys=work.num_keys,
        position=torch.tensor(positions),
        last_position=max(positions),
        tail_position=tail,
        seen=seen,
        prefix=prefix,
        first_position=_first(tail, prefix),
    )


def past_segment(work: RowWork, start: int, count: int) -> Segment:
    """What so many queries that stand where a row's next token will may look back on.

    That is all that is stored of the row, which has nothing to run.
    """
    tail = torch.zeros(0, dtype=torch.long) if work.held is None else work.key_positions()
    return Segment(
        slot=work.row,
        start=start,
        end=start + count,
        num_keys=work.root_place,
        position=torch.full((count,), work.base),
        last_position=work.base,
        tail_position=tail,
        seen=None if work.held is None else (tail >= 0).expand(count, -1),
        prefix=0 if work.held is not None else work.stored,
        first_position=_first(tail, 0 if work.held is not None else work.stored),
    )


def _fill_segment(work: RowWork, start: int) -> Segment:
    """Padding of a row without nodes; it looks at one key, so that its softmax stays finite."""
    return Segment(
        slot=work.row,
        start=start,
        end=start + work.fill,
        num_keys=1,
        position=torch.zeros(work.fill, dtype=torch.long),
        last_position=0,
        tail_position=torch.zeros(0, dtype=torch.long),
        seen=None,
        prefix=1,
    )


def _first(tail: Tensor, prefix: int) -> int:
    """Position of the first key of a row, whose text begins with 0 unless there is a gap."""
    return 0 if prefix else int(tail[0])
