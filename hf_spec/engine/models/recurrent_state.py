"""Rounds of recurrent mixers, whose state cannot be taken back to an earlier token.

A draft branches, and most of it is rejected. So a mixer (see
`hf_spec.engine.models.recurrent_layers`) is called in another way than its model calls it; all
other modules run as ever, and attention beside it stays packed.

- Pending tokens run from the row's state, and the state after them is committed.
- Nodes run as paths from the root down to the leaves, on a copy of the state. Shorter paths are
  padded on the right, and all rows share a call. What comes in at the nodes is kept for the round.
- `keep` runs what came in at the accepted nodes once more and commits the state after them (mixer
  replay): one call of the mixer alone, no attention, no MLP. It begins at the last accepted node
  whose state is there, so that a chain that was accepted whole takes no call.

A state per node would make the second call needless, and takes much memory: 24 delta nets of 32
heads of 128 x 128 have 48 MiB of it, in float32.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_spec.engine.fast.forward_overrides import ForwardOverrides
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.packing import PackedInputs, RectangularInputs
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.models.recurrent_layers import (
    COMMITTED,
    Call,
    Mixer,
    Places,
    Start,
    Step,
    mixer_resumes,
    mixers_of,
)

# Most paths per row whose last states are kept: each is as large as the row's own.
MAX_ENDS = 4


class _Running(threading.local):
    """Whose forward runs in this thread."""

    mixers: RecurrentMixers | None = None


_running = _Running()
# Of mixers whose models are active.
_forwards = ForwardOverrides()


class _Forward:
    """The forward of a mixer: for the generation that runs in this thread, or `plain`."""

    def __init__(self, module: nn.Module):
        self.plain = module.forward
        self._key = id(module)

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        mixers = _running.mixers
        if mixers is None:
            return self.plain(hidden_states, *args, **kwargs)
        return mixers.forward(self._key, hidden_states)


@dataclass
class _Round:
    """What all mixers have in common between two calls of `keep`.

    A node is a row and an offset from its root.

    Attributes:
        places: of each node that has run, its place among the inputs kept.
        ends: of nodes at the end of a path, the state after them.
        num_batches: batches of such states so far.
    """

    places: dict[tuple[int, int], int] = field(default_factory=dict)
    ends: dict[tuple[int, int], Start] = field(default_factory=dict)
    num_batches: int = 0


class RecurrentMixers:
    """All mixers of one model and the states of B rows."""

    def __init__(self, model: PreTrainedModel, num_rows: int):
        found = mixers_of(model)
        self._mixers = {id(m): Mixer(m, num_rows, mixer_resumes(model, m)) for m in found}
        # Rows that have a state.
        self._begun: set[int] = set()
        self._round = _Round()
        self._step: Step | None = None

    def active(self) -> AbstractContextManager[None]:
        """Let the mixers of the model ask which generation they run for."""
        modules = [mixer.module for mixer in self._mixers.values()]
        return _forwards.install(modules, lambda fresh: {one: _Forward(one) for one in fresh})

    @contextmanager
    def running(
        self, work: Sequence[RowWork], tree: DraftTree, inputs: PackedInputs | RectangularInputs
    ) -> Iterator[None]:
        """Call the mixers by row, for one forward of the model in this thread."""
        self._step = self._plan(work, tree, inputs)
        before, _running.mixers = _running.mixers, self
        try:
            yield
        finally:
            self._step, _running.mixers = None, before
        self._begun.update(w.row for w in work if w.pending)

    def forward(self, key: int, hidden_states: Tensor) -> Tensor:
        """What the module with this id gives in the forward that is running."""
        assert self._step is not None, "mixers run inside `running`"
        return self._mixers[key].forward(hidden_states, self._step)

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit the states after these nodes: per row offsets from its root, which comes first."""
        by_length: dict[int, list[tuple[int, Start | None, list[int]]]] = defaultdict(list)
        for row, path in paths.items():
            known = [i for i, offset in enumerate(path) if (row, offset) in self._round.ends]
            done = known[-1] + 1 if known else 0
            start = self._round.ends[row, path[done - 1]] if done else None
            places = [self._round.places[row, offset] for offset in path[done:]]
            if path:
                by_length[len(places)].append((row, start, places))
        for same in by_length.values():
            rows, starts = [row for row, _, _ in same], [start for _, start, _ in same]
            call = Call.of(rows, starts, [places for _, _, places in same], self._begun)
            for mixer in self._mixers.values():
                mixer.replay(call)
            self._begun.update(rows)
        for mixer in self._mixers.values():
            mixer.end_round()
        self._round = _Round()

    def restart(self, row: int) -> None:
        """Forget the state of `row`: a new sequence begins there."""
        self._begun.discard(row)
        for mixer in self._mixers.values():
            mixer.restart(row)

    def load(self, cache: Cache) -> None:
        """Start from the states of an earlier call."""
        for mixer in self._mixers.values():
            mixer.load(cache.layers[mixer.index])
            self._begun.update(range(len(mixer.states[COMMITTED][0])))

    def export(self, cache: DynamicCache) -> None:
        """Write the committed states into a new cache."""
        for mixer in self._mixers.values():
            mixer.export(cache)

    def _plan(
        self, work: Sequence[RowWork], tree: DraftTree, inputs: PackedInputs | RectangularInputs
    ) -> Step:
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for w in work:
            if w.pending:
                groups[len(w.pending), w.row in self._begun].append(w.row)
        pending = [
            Call.of(rows, [None] * len(rows), [inputs.pending[row] for row in rows], self._begun)
            for rows in groups.values()
        ]
        with_nodes = [w for w in work if w.nodes]
        nodes = Places(inputs.nodes)
        if not with_nodes:
            return Step(pending, None, nodes, nodes, None, {COMMITTED})
        return self._plan_paths(with_nodes, tree, pending, nodes)

    def _plan_paths(
        self, work: Sequence[RowWork], tree: DraftTree, pending: list[Call], nodes: Places
    ) -> Step:
        this = self._round
        new = [(w.row, offset) for w in work for offset in w.offsets]
        this.places.update(zip(new, count(len(this.places)), strict=False))
        paths = [path for w in work for path in _paths(w, tree, this.ends)]
        rows = [row for row, _ in paths]
        starts = [this.ends.get((row, _parent(tree, row, path[0]))) for row, path in paths]
        length = max(len(path) for _, path in paths)
        index, found = [], {}
        for number, (row, path) in enumerate(paths):
            places = [this.places[row, offset] for offset in path]
            # What a call says of padding, nobody reads.
            index.append(places + places[-1:] * (length - len(path)))
            found.update({(row, o): number * length + i for i, o in enumerate(path)})
        begun = self._begun | {w.row for w in work if w.pending}
        return Step(
            pending,
            Call.of(rows, starts, index, begun),
            nodes,
            Places([found[node] for node in new]),
            self._keep_ends(paths, len(work), length),
            {COMMITTED, *(batch for batch, _ in this.ends.values())},
        )

    def _keep_ends(
        self, paths: Sequence[tuple[int, list[int]]], num_rows: int, length: int
    ) -> int | None:
        """Note which states at the ends of paths are kept, and those of which batch.

        Of chains that grow forward by forward all are, of trees those of the newest forward.
        """
        this = self._round
        if len(paths) > num_rows:
            this.ends.clear()
        if len(paths) > MAX_ENDS * num_rows:
            return None
        batch = this.num_batches
        this.num_batches += 1
        this.ends.update(
            ((row, path[-1]), (batch, number))
            for number, (row, path) in enumerate(paths)
            # After padding it is another state.
            if len(path) == length
        )
        return batch


def _parent(tree: DraftTree, row: int, offset: int) -> int:
    """Offset of the parent of a node; negative for a root."""
    start = tree.row_start[row]
    return tree.parent[start + offset] - start


def _paths(
    work: RowWork, tree: DraftTree, known: Mapping[tuple[int, int], Start]
) -> Iterator[tuple[int, list[int]]]:
    """The row and the offsets of every path to a new leaf, from after the last known state on."""
    parents = {offset: _parent(tree, work.row, offset) for offset in work.offsets}
    inner = set(parents.values())
    for leaf in parents:
        if leaf in inner:
            continue
        path = [leaf]
        while (above := _parent(tree, work.row, path[-1])) >= 0 and (work.row, above) not in known:
            path.append(above)
        yield work.row, path[::-1]
