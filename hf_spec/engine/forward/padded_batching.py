"""Padded batches: the baselines that EMS-SD is compared with.

`BATCHING` names EMS-SD, its two halves alone, and neither of them (Ni et al. 2024, arXiv
2405.07542, section 3). Tokens, positions and attention are the same in all. Nothing in this module
runs with the default, "unpadded".

==================  ===========================  ==============================================
`batching`          inputs of the linear layers  keys and values
==================  ===========================  ==============================================
`unpadded`          the tokens alone             each row continues after its own last token
`unpadded_kv`       B rows of equal length       each row continues after its own last token
`unpadded_input`    the tokens alone             all rows continue at one index; rows that
                                                 accepted less have gaps before it
`padded`            B rows of equal length       all rows continue at one index, as in the
                                                 paper's vanilla method
==================  ===========================  ==============================================

In padded inputs a row that has ended stays until the last one ends, as in any (B, T) batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.packing import PackedInputs, pack
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.forward.row_storage import RowStorage


@dataclass(frozen=True)
class Batching:
    """Parts of a batch that are padded to the largest row of a step."""

    pads_inputs: bool = False
    pads_kv: bool = False


BATCHING = {
    "unpadded": Batching(),
    "unpadded_kv": Batching(pads_inputs=True),
    "unpadded_input": Batching(pads_kv=True),
    "padded": Batching(pads_inputs=True, pads_kv=True),
}


def make_storage(num_rows: int, batching: str) -> RowStorage:
    """Return the row storage of a batching mode, a key of `BATCHING`."""
    padding = BATCHING[batching]
    return RowStorage(num_rows) if padding == Batching() else PaddedStorage(num_rows, padding)


@dataclass
class PaddedWork(RowWork):
    """Row with padding after its nodes, and with gaps between its stored tokens.

    Attributes:
        first_index: index in the slot of the first pending token, or of the root; None right after
            `stored` tokens without gaps.
        stored_indices: indices in the slot of the stored tokens; None if there are no gaps.
        fill: number of padding tokens after the nodes: copies of the root that no token attends to.
    """

    first_index: int | None = None
    stored_indices: Sequence[int] | None = None
    fill: int = 0

    @property
    def root_index(self) -> int:
        """Index of the root in the slot."""
        first = self.stored if self.first_index is None else self.first_index
        return first + len(self.pending)

    @property
    def cache_indices(self) -> list[int]:
        """Index in the slot of every token and of the padding."""
        return [*super().cache_indices, *self._fill_indices]

    @property
    def _fill_indices(self) -> range:
        return range(self.num_keys, self.num_keys + self.fill)

    def shape_key(self, tree: DraftTree) -> object:
        """Return the key of `RowWork`; a row with gaps equals no other."""
        if self.stored_indices is not None:
            return self.row
        return super().shape_key(tree), self.root_index, self.fill

    def tokens(self, tree: DraftTree) -> list[int]:
        """Return the token ids and those of the padding."""
        # A row without nodes has no root here; 0 is a token of every model.
        copied = tree.tokens[self.nodes[0]] if self.nodes else 0
        return [*super().tokens(tree), *[copied] * self.fill]

    def positions(self, tree: DraftTree) -> list[int]:
        """Return the position of every token, and the root's for the padding."""
        return [*super().positions(tree), *[self.root_position] * self.fill]

    def key_positions(self) -> Tensor:
        """Return (root_index,) int64, the position of the token at each index, -1 in a gap."""
        if self.stored_indices is None:
            return super().key_positions()
        positions = torch.full((self.root_index,), -1)
        positions[torch.tensor(self.stored_indices, dtype=torch.long)] = torch.arange(self.stored)
        first = self.root_index - len(self.pending)
        positions[first:] = torch.arange(self.stored, self.root_position)
        return positions

    def segments(self, tree: DraftTree, start: int = 0) -> list[Segment]:
        """Return the row's segments; padding attends to what the root attends to."""
        segments = super().segments(tree, start)
        if self.stored_indices is not None:
            if self.pending:
                segments[0] = self._chain_with_gaps(segments[0])
            if self.nodes:
                segments[-1] = self._tree_with_gaps(segments[-1], tree)
        if self.nodes and self.fill:
            segments[-1] = self._filled(segments[-1])
        elif self.fill:
            segments.append(self._fill_segment(start + len(self.pending)))
        return segments

    def query_segment(self, start: int, count: int) -> Segment:
        """Return a segment of `count` queries at the row's next position."""
        segment = super().query_segment(start, count)
        if self.stored_indices is None:
            return segment
        tail = self.key_positions()
        return _without_prefix(segment, tail, (tail >= 0).expand(count, -1))

    def _chain_with_gaps(self, segment: Segment) -> Segment:
        tail = self.key_positions()
        return _without_prefix(segment, tail, (tail >= 0) & (tail <= segment.position[:, None]))

    def _tree_with_gaps(self, segment: Segment, tree: DraftTree) -> Segment:
        before = self.key_positions()
        depths = torch.tensor(self.node_depths(tree), dtype=torch.long)
        tail = torch.cat([before, self.root_position + depths])
        committed = (before >= 0).expand(len(self.nodes), -1)
        seen = torch.cat([committed, self.visible_nodes(tree)], dim=1)
        return _without_prefix(segment, tail, seen)

    def _filled(self, segment: Segment) -> Segment:
        """Extend the nodes' segment by the padding."""
        seen = segment.seen
        if seen is not None:
            lines = seen.new_zeros(self.fill, seen.shape[1])
            if not segment.prefix:
                # With gaps, committed tokens and the root are not in the prefix.
                lines[:, : self.root_index] = self.key_positions() >= 0
                lines[:, self.root_index] = True
            seen = torch.cat([seen, lines])
        positions = torch.full((self.fill,), self.root_position)
        return replace(
            segment,
            end=segment.end + self.fill,
            position=torch.cat([segment.position, positions]),
            seen=seen,
            cache_indices=[*segment.cache_indices, *self._fill_indices],
        )

    def _fill_segment(self, start: int) -> Segment:
        """Padding of a row without nodes; it attends to one key, so its softmax stays finite."""
        return Segment(
            slot=self.row,
            start=start,
            end=start + self.fill,
            num_keys=1,
            position=torch.zeros(self.fill, dtype=torch.long),
            last_position=0,
            tail_position=torch.zeros(0, dtype=torch.long),
            seen=None,
            prefix=1,
            cache_indices=self._fill_indices,
        )


def _without_prefix(segment: Segment, tail: Tensor, seen: Tensor) -> Segment:
    """Return the segment with all its keys given one by one: gaps may be anywhere."""
    first = int(tail[0])
    return replace(
        segment, prefix=0, tail_position=tail, seen=seen, first_position=first, is_chain=False
    )


def fill_up(work: Sequence[PaddedWork], idle: Sequence[PaddedWork]) -> list[PaddedWork]:
    """Pad rows with something to run, and idle ones, to the length of the longest row."""
    length = max(w.num_tokens for w in work)
    rows = sorted([*work, *idle], key=lambda w: w.row)
    for w in rows:
        w.fill = length - w.num_tokens
    return rows


def pack_padded(work: Sequence[PaddedWork], tree: DraftTree) -> PackedInputs:
    """Pack rows that are filled up; the head runs equally many tokens of each row."""
    inputs, start = pack(work, tree), 0
    most_nodes = max(len(w.nodes) for w in work)
    for w in work:
        after = start + w.num_tokens
        inputs.head_padding += range(after, after + min(w.fill, most_nodes - len(w.nodes)))
        start = after + w.fill
    return inputs


class PaddedStorage(RowStorage):
    """Row storage with padded inputs, or with all rows continuing at one index, or both."""

    def __init__(self, num_rows: int, padding: Batching):
        super().__init__(num_rows)
        self.pads_inputs = padding.pads_inputs
        self._pads_kv = padding.pads_kv
        # With aligned rows: the indices of each row's stored tokens, and where all rows continue.
        self._stored_indices: list[list[int]] = [[] for _ in range(num_rows)]
        self._front = 0

    def plan(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> list[RowWork]:
        """See `RowStorage.plan`; rows have gaps if they are aligned."""
        work: list[RowWork] = []
        for w in super().plan(tree, sequences, nodes):
            root, _ = self._round[w.row]
            stored = None if root == w.root_position else list(self._stored_indices[w.row])
            first = root - len(w.pending)
            work.append(PaddedWork(**vars(w), first_index=first, stored_indices=stored))
        return work

    def pack(self, work: Sequence[RowWork], tree: DraftTree) -> PackedInputs:
        """See `RowStorage.pack`; rows have equal length if inputs are padded."""
        if not self.pads_inputs:
            return super().pack(work, tree)
        padded = [w for w in work if isinstance(w, PaddedWork)]
        rows = fill_up(padded, self.idle_rows({w.row for w in work}))
        self.pool.reserve(max(w.num_keys + w.fill for w in rows) + 1)
        return pack_padded(rows, tree)

    def stored_row(self, row: int) -> RowWork:
        """See `RowStorage.stored_row`."""
        work, indices = super().stored_row(row), self._stored_indices[row]
        if not indices or indices[-1] + 1 == work.stored:
            return work
        return PaddedWork(**vars(work), first_index=indices[-1] + 1, stored_indices=list(indices))

    def idle_rows(self, busy: set[int]) -> list[PaddedWork]:
        """Return the rows that are not in `busy`, from the first free index of their slot on."""
        idle = []
        for row in set(range(self.pool.num_slots)) - busy:
            root, ran = self._round.get(row, (0, set()))
            indices = self._stored_indices[row]
            stored_end = indices[-1] + 1 if indices else self.stored[row]
            free = max(stored_end, root + max(ran, default=-1) + 1)
            shift = self.position_offsets[row]
            work = PaddedWork(row, self.stored[row], [], first_index=free, position_offset=shift)
            idle.append(work)
        return idle

    def shorten(self, row: int, length: int) -> None:
        """See `RowStorage.shorten`."""
        super().shorten(row, length)
        del self._stored_indices[row][length:]

    def export(self, cache: DynamicCache, frame_masks: Sequence[Tensor]) -> None:
        """See `RowStorage.export`; closes the gaps first."""
        self.pool.move_rows(
            [(row, indices, 0) for row, indices in enumerate(self._stored_indices) if indices]
        )
        self._stored_indices = [list(range(len(indices))) for indices in self._stored_indices]
        super().export(cache, frame_masks)

    def _root_indices(self, pending: Mapping[int, int]) -> dict[int, int]:
        if not self._pads_kv:
            return super()._root_indices(pending)
        return dict.fromkeys(pending, self._front + max(pending.values(), default=0))

    def _store(self, row: int, indices: range) -> None:
        super()._store(row, indices)
        if self._pads_kv and indices:
            self._stored_indices[row] += indices
            self._front = max(self._front, indices.stop)
