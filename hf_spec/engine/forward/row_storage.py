"""Committed tokens of each row in a key-value pool, and where its next tokens go.

A row's sequence has three parts: tokens whose keys and values are stored, *pending* tokens
(committed, not stored; the last of them is the root of the next tree), and the nodes of the tree.
The time between two calls of `keep` is a *round*: nodes that run are stored after the root, and
`keep` commits the accepted ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from torch import Tensor
from transformers import Cache, DynamicCache

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.packing import PackedInputs, pack
from hf_spec.engine.forward.row_batch import RowWork


class RowStorage:
    """Key-value pool with one slot per row, and the bookkeeping of its contents.

    Attributes:
        pool: the keys and values.
        stored: per row the number of committed tokens that are stored.
        position_offsets: per row the difference between the position ids passed to the model and
            the number of tokens before, as after an image.
        paddings: per row the number of tokens that plain `generate()` pads on the left.
        pads_inputs: True for baselines that pad the inputs, see `padded_batching`.
    """

    pads_inputs = False

    def __init__(self, num_rows: int):
        self.pool = KVPool(num_rows)
        self.stored = [0] * num_rows
        self.position_offsets = [0] * num_rows
        self.paddings = [0] * num_rows
        # Rows of the round: index of the root in the slot, offsets of the nodes that have run.
        self._round: dict[int, tuple[int, set[int]]] = {}

    def plan(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> list[RowWork]:
        """Return the tokens that the rows of these nodes run: pending ones, then the nodes."""
        by_row = _nodes_by_row(tree, nodes)
        new = {
            row: len(sequences[row]) - 1 - self.stored[row]
            for row in by_row
            if row not in self._round
        }
        for row, root in self._root_indices(new).items():
            self._round[row] = root, set()
        work = []
        for row, row_nodes in by_row.items():
            stored, start = self.stored[row], tree.row_start[row]
            pending = list(sequences[row][stored : len(sequences[row]) - 1])
            offsets = [node - start for node in row_nodes]
            width = max(offsets[-1], max(self._round[row][1], default=0)) + 1
            shift = self.position_offsets[row]
            work.append(RowWork(row, stored, pending, row_nodes, offsets, width, shift))
        return work

    def pack(self, work: Sequence[RowWork], tree: DraftTree) -> PackedInputs:
        """Return the packed model inputs of these rows."""
        return pack(work, tree)

    def mark_ran(self, work: Sequence[RowWork]) -> None:
        """Record that these tokens have run: pending ones are stored, nodes can be kept."""
        for w in work:
            self._store(w.row, range(w.root_index - len(w.pending), w.root_index))
            self._round[w.row][1].update(w.offsets)

    def keep(self, paths: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Commit each row's accepted path, moving its keys and values together in place.

        `paths` are per row the accepted nodes, counted from the row's root, without it. The first
        node that was never run ends the committed part; the rest is pending. Returns row -> the
        committed nodes, the root first.
        """
        moves, committed = [], {}
        for row, (root, ran) in self._round.items():
            path = [0, *paths[row]]
            end = next((i for i, offset in enumerate(path) if offset not in ran), len(path))
            moved = next((i for i in range(end) if path[i] != i), end)
            if moved < end:
                moves.append((row, [root + offset for offset in path[moved:end]], root + moved))
            self._store(row, range(root, root + end))
            committed[row] = path[:end]
        self.pool.move_rows(moves)
        self._round.clear()
        return committed

    def stored_row(self, row: int) -> RowWork:
        """Return a row with nothing to run, for queries to its stored tokens."""
        return RowWork(row, self.stored[row], [])

    def restart(self, row: int) -> None:
        """Drop everything stored of `row`, for a new sequence."""
        self.shorten(row, 0)
        self.position_offsets[row] = self.paddings[row] = 0

    def shorten(self, row: int, length: int) -> None:
        """Drop what is stored of `row` after its first `length` tokens."""
        self.stored[row] = min(self.stored[row], length)

    def load(self, cache: Cache, frame_masks: Sequence[Tensor]) -> None:
        """Start from the keys and values of an earlier call; see `KVPool.load`."""
        self.pool.load(cache, frame_masks)
        for row, mask in enumerate(frame_masks):
            self._store(row, range(int(mask.sum())))

    def export(self, cache: DynamicCache, frame_masks: Sequence[Tensor]) -> None:
        """Write what is stored into `cache`; see `KVPool.export`."""
        self.pool.export(cache, frame_masks, self.stored)

    def _root_indices(self, pending: Mapping[int, int]) -> dict[int, int]:
        """Return the index of the root per row, given its number of pending tokens."""
        return {row: self.stored[row] + count for row, count in pending.items()}

    def _store(self, row: int, indices: range) -> None:
        """Record that the next tokens of `row` are stored at these indices of its slot."""
        self.stored[row] += len(indices)


def _nodes_by_row(tree: DraftTree, nodes: Sequence[int]) -> dict[int, list[int]]:
    """Split ascending node indices by row; rows without any are left out."""
    by_row, begin = {}, 0
    for row in range(tree.num_rows):
        end = bisect_left(nodes, tree.row_start[row + 1], begin)
        if end > begin:
            by_row[row] = list(nodes[begin:end])
        begin = end
    return by_row
