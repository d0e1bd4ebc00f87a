"""Where the tokens of each row stand in a key-value pool, and where the next ones go.

A row's sequence splits in three: tokens whose keys and values are stored, *pending* tokens
(committed, not stored; the last of them is the root of the next tree), and the nodes of the tree.
Between two calls of `keep` lies a *round*: nodes that run pile up after the root, and `keep` says
which of them become part of the sequence.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from torch import Tensor
from transformers import Cache, DynamicCache

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.row_batch import Batching, RowWork


class RowStorage:
    """A pool with a slot per row and the bookkeeping of what they hold.

    `stored` has per row how many committed tokens have keys and values; `position_offsets`, how far
    the positions that the model is told are from the number of tokens before, as after an image;
    `paddings`, how many places plain `generate()` pads on the left.
    """

    def __init__(self, num_rows: int, batching: Batching):
        self.pool = KVPool(num_rows)
        self.batching = batching
        self.stored = [0] * num_rows
        self.position_offsets = [0] * num_rows
        self.paddings = [0] * num_rows
        # Per row in the round: storage place of its root, offsets of the nodes that have run.
        self._round: dict[int, tuple[int, set[int]]] = {}
        # With padded storage: per row the places of what is stored, and where all rows go on.
        self._held: list[list[int]] = [[] for _ in range(num_rows)]
        self._front = 0

    def keep(self, paths: Sequence[Sequence[int]]) -> dict[int, list[int]]:
        """Keep the keys and values of each row's accepted path, moved together in place.

        Paths are counted from the row's root, which they leave out. A node that was never run ends
        the kept part; what follows is pending.

        Returns:
            Row -> the nodes that were kept, the root first.
        """
        moves, kept = [], {}
        for row, (root, ran) in self._round.items():
            path = [0, *paths[row]]
            end = next((i for i, offset in enumerate(path) if offset not in ran), len(path))
            moved = next((i for i in range(end) if path[i] != i), end)
            if moved < end:
                moves.append((row, [root + offset for offset in path[moved:end]], root + moved))
            self._store(row, range(root, root + end))
            kept[row] = path[:end]
        self.pool.move_rows(moves)
        self._round.clear()
        return kept

    def restart(self, row: int) -> None:
        """Forget everything stored of `row`: a new sequence begins there."""
        self.shorten(row, 0)
        self.position_offsets[row] = self.paddings[row] = 0

    def shorten(self, row: int, length: int) -> None:
        """Forget what is stored of `row` after its first `length` tokens."""
        self.stored[row] = min(self.stored[row], length)
        del self._held[row][length:]

    def load(self, cache: Cache, frame_masks: Sequence[Tensor]) -> None:
        """Start from the keys and values of an earlier call; see `KVPool.load`."""
        self.pool.load(cache, frame_masks)
        for row, mask in enumerate(frame_masks):
            self._store(row, range(int(mask.sum())))

    def export(self, cache: DynamicCache, frame_masks: Sequence[Tensor]) -> None:
        """Write what is stored into `cache`; see `KVPool.export`."""
        self.pool.move_rows([(row, held, 0) for row, held in enumerate(self._held) if held])
        self._held = [list(range(len(held))) for held in self._held]
        self.pool.export(cache, frame_masks, self.stored)

    def begin_round(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> None:
        """Choose where the root goes, for every row of these nodes that is new in the round."""
        new = [row for row in _by_row(tree, nodes) if row not in self._round]
        pending = {row: len(sequences[row]) - 1 - self.stored[row] for row in new}
        common = self._front + max(pending.values(), default=0)
        for row, count in pending.items():
            root = common if self.batching.pads_kv else self.stored[row] + count
            self._round[row] = root, set()

    def plan(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> list[RowWork]:
        """What the rows of these nodes have to run: their pending tokens, then the nodes."""
        work = []
        for row, chosen in _by_row(tree, nodes).items():
            root, ran = self._round[row]
            stored = self.stored[row]
            pending = list(sequences[row][stored : len(sequences[row]) - 1])
            offsets = [node - tree.row_start[row] for node in chosen]
            width = max([*ran, *offsets]) + 1
            held = None if root == stored + len(pending) else list(self._held[row])
            start = root - len(pending)
            shift = self.position_offsets[row]
            work.append(
                RowWork(
                    row, stored, pending, chosen, offsets, width, start, held, position_offset=shift
                )
            )
        return work

    def past(self, row: int) -> RowWork:
        """What is stored of a row, with nothing to run."""
        held, count = self._held[row], self.stored[row]
        if not held or held[-1] + 1 == count:
            return RowWork(row, count, [])
        return RowWork(row, count, [], start=held[-1] + 1, held=list(held))

    def idle(self, busy: set[int]) -> list[RowWork]:
        """The other rows, with the first place after everything that they hold."""
        found = []
        for row in set(range(self.pool.num_slots)) - busy:
            root, ran = self._round.get(row, (0, set()))
            held = self._held[row]
            stored_end = held[-1] + 1 if held else self.stored[row]
            free = max(stored_end, root + max(ran, default=-1) + 1)
            shift = self.position_offsets[row]
            found.append(RowWork(row, self.stored[row], [], start=free, position_offset=shift))
        return found

    def note(self, work: Sequence[RowWork]) -> None:
        """Record that these tokens have run: what was pending is stored, the nodes are there."""
        for w in work:
            self._store(w.row, range(w.root_place - len(w.pending), w.root_place))
            self._round[w.row][1].update(w.offsets)

    def _store(self, row: int, places: range) -> None:
        """Note that the next tokens of `row` are stored at `places`."""
        self.stored[row] += len(places)
        if self.batching.pads_kv and places:
            self._held[row] += places
            self._front = max(self._front, places.stop)


def _by_row(tree: DraftTree, nodes: Sequence[int]) -> dict[int, list[int]]:
    """The given nodes of every row that has some."""
    found = {}
    for row in range(tree.num_rows):
        mine = tree.nodes(row)
        chosen = list(nodes[bisect_left(nodes, mine.start) : bisect_left(nodes, mine.stop)])
        if chosen:
            found[row] = chosen
    return found
