"""Model inputs for the new tokens of a ragged batch: one packed sequence, or a rectangle.

Packed, (1, T): the tokens of all rows one after the other, without padding, for models with the
attention interface. Rectangular, (B, T): one line per row, aligned on the right, padded on the
left, with a 4D mask, for the other models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.step import PackedStep


@dataclass
class PackedInputs:
    """All T tokens in one sequence, row by row.

    Attributes:
        positions: position ids as passed to the model.
        segments: what the tokens attend to, and where they are stored; by true positions.
        pending: row -> indices of its pending tokens among the T.
        nodes: indices of the tree nodes among the T, in tree order.
        head_padding: indices of padding tokens that the head runs too; only in padded baselines.
    """

    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    segments: list[Segment] = field(default_factory=list)
    pending: dict[int, range] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)
    head_padding: list[int] = field(default_factory=list)

    def frame_positions(self, paddings: Sequence[int]) -> list[int]:
        """Return the position of each token in plain `generate()`, which counts left padding."""
        return [
            position + paddings[segment.slot]
            for segment in self.segments
            for position in segment.position.tolist()
        ]


@dataclass
class RectangularInputs:
    """One line of T columns per row, on the host; padding is 0.

    Attributes:
        tokens: (B, T) int64.
        positions: (B, T) int64 position ids as passed to the model.
        cache_indices: (B, T) int64, index in the slot of each token.
        visible: (B, T, S) bool, keys that each token attends to.
        key_positions: (B, S) int64, the true position of each key.
        pending, nodes: as in `PackedInputs`, counted over B * T.
    """

    tokens: Tensor
    positions: Tensor
    cache_indices: Tensor
    visible: Tensor
    key_positions: Tensor
    pending: dict[int, range] = field(default_factory=dict)
    nodes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class PreparedStep:
    """A packed pass that the host has prepared: its attention step, and inputs of the model."""

    step: PackedStep
    tensors: list[Tensor]


@dataclass(frozen=True)
class PreparedPass(PreparedStep):
    """A packed forward pass over draft trees; `tensors` are on the host.

    Attributes:
        work, inputs: its tokens by row, and packed.
        tree: the draft tree.
    """

    work: list[RowWork]
    tree: DraftTree
    inputs: PackedInputs

    @property
    def has_prompt(self) -> bool:
        """True if a row had nothing stored before."""
        return any(w.stored == 0 for w in self.work)


def pack(work: Sequence[RowWork], tree: DraftTree) -> PackedInputs:
    """Lay the tokens of all rows one after the other; equal rows share masks."""
    inputs = PackedInputs()
    # By shape: the positions and segments of the first such row, and where its tokens begin.
    shapes: dict[object, tuple[list[int], list[Segment], int]] = {}
    for w in work:
        start = len(inputs.tokens)
        begin = start + len(w.pending)
        key = w.shape_key(tree) if len(work) > 1 else None
        if key in shapes:
            positions, segments, first = shapes[key]
            segments = [segment.moved(w.row, segment.start + start - first) for segment in segments]
        else:
            positions, segments = w.positions(tree), w.segments(tree, start)
            shapes[key] = positions, segments, start
        inputs.tokens += w.tokens(tree)
        inputs.positions += w.position_ids(positions)
        inputs.segments += segments
        inputs.pending[w.row] = range(start, begin)
        inputs.nodes += range(begin, begin + len(w.nodes))
    return inputs


def align_right(
    work: Sequence[RowWork], tree: DraftTree, num_rows: int, spare_index: int
) -> RectangularInputs:
    """Lay the tokens of each row at the right end of a line; rows without work are padding.

    Padding is stored at `spare_index`, which no token attends to.
    """
    length = max(w.num_tokens for w in work)
    num_keys = max(w.num_keys for w in work)
    inputs = RectangularInputs(
        tokens=torch.zeros(num_rows, length, dtype=torch.long),
        positions=torch.zeros(num_rows, length, dtype=torch.long),
        cache_indices=torch.full((num_rows, length), spare_index),
        visible=torch.zeros(num_rows, length, num_keys, dtype=torch.bool),
        key_positions=torch.arange(num_keys).repeat(num_rows, 1),
    )
    # Padding attends to the first key only, so that its softmax stays finite; its output is unused.
    inputs.visible[:, :, 0] = True
    for w in work:
        first = length - w.num_tokens
        begin = first + len(w.pending)
        # Negative in the gaps of padded baselines.
        before, root = w.key_positions(), w.root_index
        depths = torch.tensor(w.node_depths(tree), dtype=torch.long)
        pending_positions = torch.arange(w.stored, w.root_position)[:, None]
        inputs.tokens[w.row, first:] = torch.tensor(w.tokens(tree))
        inputs.positions[w.row, first:] = torch.tensor(w.position_ids(w.positions(tree)))
        inputs.cache_indices[w.row, first:] = torch.tensor(w.cache_indices)
        inputs.visible[w.row, first:] = False
        inputs.visible[w.row, first:begin, :root] = (before >= 0) & (before <= pending_positions)
        # No token attends to a gap, but its ALiBi bias must be finite.
        inputs.key_positions[w.row, :root] = before.clamp(min=0)
        if w.nodes:
            inputs.visible[w.row, begin:, :root] = before >= 0
            inputs.visible[w.row, begin:, root : w.num_keys] = w.visible_nodes(tree)
            inputs.key_positions[w.row, root : w.num_keys] = w.root_position + depths
        line = w.row * length
        inputs.pending[w.row] = range(line + first, line + begin)
        inputs.nodes += range(line + begin, line + length)
    return inputs
