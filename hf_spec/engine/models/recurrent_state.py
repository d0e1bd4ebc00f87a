"""Rounds of recurrent mixers, whose state cannot be rolled back to an earlier token.

A draft branches, and most of it is rejected. The mixers (see `recurrent_layers`) of a model are
therefore called row by row and path by path. All other modules run as usual, attention packed.

- Pending tokens run from the row's committed state, and the state after them is committed.
- Nodes run as paths from the root to the leaves, on a copy of the state. Shorter paths are padded
  on the right, and all rows share a call. The mixer's inputs at the nodes are stored in the round.
- `keep` runs the inputs at the accepted nodes again and commits the state after them (mixer
  replay): one call of the mixer alone, without attention and MLP. It starts from the last accepted
  node whose state is stored, so a chain that is accepted completely needs no call.

A state per node would save the replay, but takes much memory: 24 delta nets of 32 heads of 128 x
128 have a state of 48 MiB in float32.
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

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.forward_overrides import ForwardOverrides
from hf_spec.engine.forward.packing import PackedInputs, RectangularInputs
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.models.recurrent_layers import (
    COMMITTED,
    Indices,
    Mixer,
    MixerCall,
    MixerStep,
    Start,
    mixer_resumes,
    mixers_of,
)

# Most paths per row whose last states are stored; each is as large as the committed state.
MAX_ENDS = 4


class _Running(threading.local):
    # Mixers of the model that runs a forward pass in this thread.
    mixers: RecurrentMixers | None = None


_running = _Running()
# Overrides of the mixers of active models.
_overrides = ForwardOverrides()


class _Forward:
    """Forward of a mixer in the generation of this thread; `plain` without one."""

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
    """Bookkeeping of all mixers between two calls of `keep`; nodes are (row, offset from root)."""

    # Node that has run -> index among the stored inputs.
    inputs: dict[tuple[int, int], int] = field(default_factory=dict)
    # Node at the end of a path -> the state after it, and how many batches of these there are.
    ends: dict[tuple[int, int], Start] = field(default_factory=dict)
    num_batches: int = 0


class RecurrentMixers:
    """All mixers of one model and the states of B rows."""

    def __init__(self, model: PreTrainedModel, num_rows: int):
        self._mixers = {
            id(module): Mixer(module, num_rows, mixer_resumes(model, module))
            for module in mixers_of(model)
        }
        # Rows with a committed state.
        self._begun: set[int] = set()
        self._round = _Round()
        self._step: MixerStep | None = None

    def active(self) -> AbstractContextManager[None]:
        """Let the mixers of the model run for the generation in their thread."""
        modules = [mixer.module for mixer in self._mixers.values()]
        return _overrides.install(modules, lambda fresh: {part: _Forward(part) for part in fresh})

    @contextmanager
    def running(
        self, work: Sequence[RowWork], tree: DraftTree, inputs: PackedInputs | RectangularInputs
    ) -> Iterator[None]:
        """Call the mixers by row, for one forward pass of the model in this thread."""
        self._step = self._plan(work, tree, inputs)
        before, _running.mixers = _running.mixers, self
        try:
            yield
        finally:
            self._step, _running.mixers = None, before
        self._begun.update(w.row for w in work if w.pending)

    def forward(self, key: int, hidden_states: Tensor) -> Tensor:
        """Return the output of the mixer with this module id in the current forward pass."""
        assert self._step is not None, "mixers run inside `running`"
        return self._mixers[key].forward(hidden_states, self._step)

    def keep(self, paths: Mapping[int, Sequence[int]]) -> None:
        """Commit the states after these paths: row -> offsets from its root, the root first."""
        by_length: dict[int, list[tuple[int, Start | None, list[int]]]] = defaultdict(list)
        for row, path in paths.items():
            stored = [i for i, offset in enumerate(path) if (row, offset) in self._round.ends]
            done = stored[-1] + 1 if stored else 0
            start = self._round.ends[row, path[done - 1]] if done else None
            inputs = [self._round.inputs[row, offset] for offset in path[done:]]
            if path:
                by_length[len(inputs)].append((row, start, inputs))
        for group in by_length.values():
            rows, starts = [row for row, _, _ in group], [start for _, start, _ in group]
            call = MixerCall.of(rows, starts, [inputs for _, _, inputs in group], self._begun)
            for mixer in self._mixers.values():
                mixer.replay(call)
            self._begun.update(rows)
        for mixer in self._mixers.values():
            mixer.end_round()
        self._round = _Round()

    def restart(self, row: int) -> None:
        """Drop the state of `row`, for a new sequence."""
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
    ) -> MixerStep:
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for w in work:
            if w.pending:
                groups[len(w.pending), w.row in self._begun].append(w.row)
        pending = []
        for rows in groups.values():
            index = [inputs.pending[row] for row in rows]
            pending.append(MixerCall.of(rows, [None] * len(rows), index, self._begun))
        with_nodes = [w for w in work if w.nodes]
        nodes = Indices(inputs.nodes)
        if not with_nodes:
            return MixerStep(pending, None, nodes, nodes, None, {COMMITTED})
        return self._plan_paths(with_nodes, tree, pending, nodes)

    def _plan_paths(
        self, work: Sequence[RowWork], tree: DraftTree, pending: list[MixerCall], nodes: Indices
    ) -> MixerStep:
        inputs, ends = self._round.inputs, self._round.ends
        new = [(w.row, offset) for w in work for offset in w.offsets]
        inputs.update(zip(new, count(len(inputs)), strict=False))
        paths = [path for w in work for path in _paths(w, tree, ends)]
        rows = [row for row, _ in paths]
        starts = [ends.get((row, _parent(tree, row, path[0]))) for row, path in paths]
        length = max(len(path) for _, path in paths)
        index, outputs = [], {}
        for number, (row, path) in enumerate(paths):
            path_inputs = [inputs[row, offset] for offset in path]
            # The outputs of the padding are not used.
            index.append(path_inputs + path_inputs[-1:] * (length - len(path)))
            outputs.update({(row, o): number * length + i for i, o in enumerate(path)})
        begun = self._begun | {w.row for w in work if w.pending}
        return MixerStep(
            pending,
            MixerCall.of(rows, starts, index, begun),
            nodes,
            Indices([outputs[node] for node in new]),
            self._store_ends(paths, len(work), length),
            {COMMITTED, *(batch for batch, _ in ends.values())},
        )

    def _store_ends(
        self, paths: Sequence[tuple[int, list[int]]], num_rows: int, length: int
    ) -> int | None:
        """Record the states at the ends of the paths; return their batch, or None to drop them.

        Chains that grow level by level keep those of every forward pass, trees of the latest one.
        """
        current = self._round
        if len(paths) > num_rows:
            current.ends.clear()
        if len(paths) > MAX_ENDS * num_rows:
            return None
        batch = current.num_batches
        current.num_batches += 1
        current.ends.update(
            ((row, path[-1]), (batch, number))
            for number, (row, path) in enumerate(paths)
            # The state of a shorter path is the one after its padding.
            if len(path) == length
        )
        return batch


def _parent(tree: DraftTree, row: int, offset: int) -> int:
    start = tree.row_start[row]
    return tree.parent[start + offset] - start


def _paths(
    work: RowWork, tree: DraftTree, ends: Mapping[tuple[int, int], Start]
) -> Iterator[tuple[int, list[int]]]:
    """Yield (row, offsets) of the path to every new leaf, from after the last stored state."""
    parents = {offset: _parent(tree, work.row, offset) for offset in work.offsets}
    inner = set(parents.values())
    for leaf in parents:
        if leaf in inner:
            continue
        path = [leaf]
        while (above := _parent(tree, work.row, path[-1])) >= 0 and (work.row, above) not in ends:
            path.append(above)
        yield work.row, path[::-1]
