"""Recurrent mixers: modules that keep a state of a sequence instead of keys and values.

Linear attention, state-space and short convolution modules of transformers sum a sequence up in a
few tensors, which cannot be taken back to an earlier token. A draft branches, and most of it is
rejected. So a *mixer* is called in another way than its model calls it; all other modules run as
ever, and attention beside it stays packed.

- Pending tokens run from the row's state, and the state after them is committed.
- Nodes run as paths from the root down to the leaves, on a copy of the state. Shorter paths are
  padded on the right, and all rows share a call. What comes in at the nodes is kept for the round.
- `keep` runs what came in at the accepted nodes once more and commits the state after them (mixer
  replay): one call of the mixer alone, no attention, no MLP. It begins at the last accepted node
  whose state is there, so that a chain that was accepted whole takes no call.

Every sum is that of plain `generate()`; the exact state after a path costs a second call instead of
a state per node, which for a delta net of 24 layers is about 50 MB.
"""

from __future__ import annotations

import inspect
import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

from hf_spec.execution.cpu_linear import fast_products
from hf_spec.execution.own_forwards import OwnForwards
from hf_spec.execution.packing import PackedInputs, RectangularInputs
from hf_spec.execution.per_model import made_once
from hf_spec.execution.placement import execution_device
from hf_spec.execution.row_work import RowWork
from hf_spec.execution.transfer import send
from hf_spec.execution.tree import DraftTree

# Of R sequences: the convolution's (R, channels, width), and of all but bare convolutions the
# recurrence's (R, ...).
State = list[Tensor]

# A state by the batch of states that it is in and its place there.
Start = tuple[int, int]
# The batch of the rows' own states. Those at the ends of paths are numbered from 0.
COMMITTED = -1
# Most paths per row whose last states are kept: each is as large as the row's own.
MAX_ENDS = 4

# Kinds of layers by what they keep: a state (in the last one beside keys and values), or nothing.
RECURRENT_LAYERS = ("linear_attention", "conv", "hybrid")
PASTLESS_LAYERS = ("moe", "mlp")

# Names under which a mixer takes its cache.
CACHE_NAMES = ("cache_params", "past_key_values")


def _cache_name(module: nn.Module) -> str | None:
    """The name under which a module takes the cache of a mixer; None if it is none."""
    kind: Any = type(module)
    return _cache_name_of(kind)


@cache
def _cache_name_of(kind: Any) -> str | None:
    parameters = inspect.signature(kind.forward).parameters
    try:
        calls = ".update_conv_state(" in inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return None
    if not calls or not {"hidden_states", "attention_mask"} <= set(parameters):
        return None
    return next((name for name in CACHE_NAMES if name in parameters), None)


def mixers_of(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that take hidden states and a cache, and keep a state in it."""
    found = (m for m in model.modules() if hasattr(m, "layer_idx"))
    return [module for module in found if _cache_name(module) is not None]


def num_recurrent_layers(config: PreTrainedConfig) -> int:
    """How many layers of a text model keep a state."""
    return sum(map(_kinds(config).count, RECURRENT_LAYERS))


def recurrent_share(config: PreTrainedConfig) -> float:
    """Share of the layers of a text model that keep a state."""
    return num_recurrent_layers(config) / config.num_hidden_layers


def num_attention_layers(config: PreTrainedConfig) -> int:
    """How many layers of a text model attend."""
    kinds = _kinds(config)
    others = sum(map(kinds.count, PASTLESS_LAYERS)) - kinds.count("hybrid")
    return config.num_hidden_layers - num_recurrent_layers(config) - others


def _kinds(config: PreTrainedConfig) -> list[str]:
    return list(getattr(config, "layer_types", None) or ())[: config.num_hidden_layers]


def resumes(model: PreTrainedModel) -> bool:
    """Whether all mixers go on from a state with several tokens at once.

    The scan of Mamba-1 in transformers (5.23) begins at zero wherever it is called with more than
    one token. Tried out once per model.
    """
    return all(_resumes(model, mixer) for mixer in mixers_of(model))


def _resumes(model: PreTrainedModel, mixer: nn.Module) -> bool:
    return made_once(model, ("resumes", type(mixer)), lambda: _heeds_state(model, mixer))


@torch.no_grad()
def _heeds_state(model: PreTrainedModel, module: nn.Module) -> bool:
    """Whether the state that a call of two tokens is given makes a difference to it."""
    mixer = _Mixer(module, num_rows=1, resumes=True)
    width = model.config.get_text_config().hidden_size
    inputs = torch.ones(1, 2, width, dtype=model.dtype, device=execution_device(module))
    _, (convolved, *recurrent) = mixer.run(inputs, None)
    if not recurrent:
        return True
    states = [[convolved, torch.full_like(recurrent[0], value)] for value in (0, 1)]
    (zeros, after_zeros), (ones, after_ones) = (mixer.run(inputs, state) for state in states)
    return not (torch.equal(zeros, ones) and torch.equal(after_zeros[-1], after_ones[-1]))


class _Places:
    """Indices, for all mixers on a device sent there once."""

    def __init__(self, places: Sequence[int] | Sequence[Sequence[int]]):
        self._host = torch.tensor(places, dtype=torch.long)
        self._sent: dict[torch.device, Tensor] = {}
        self.count = self._host.numel()

    def of(self, other: Tensor) -> Tensor:
        """The indices where another tensor is."""
        if other.device not in self._sent:
            self._sent[other.device] = send([self._host], other.device)[0]
        return self._sent[other.device]


@dataclass(frozen=True)
class _Call:
    """R stretches of T tokens for one call of every mixer.

    Attributes:
        rows: (R,) the row of each stretch.
        starts: the states that they begin from; None where those are the rows' own.
        index: (R, T) where the inputs are among those given.
        fresh: whether no row has a state yet.
    """

    rows: _Places
    starts: list[Start] | None
    index: _Places
    fresh: bool

    @classmethod
    def of(
        cls,
        rows: Sequence[int],
        starts: Sequence[Start | None],
        index: Sequence[Sequence[int]],
        begun: set[int],
    ) -> _Call:
        """From the rows that have a state, and starts that are None for the row's own."""
        known = [start or (COMMITTED, row) for row, start in zip(rows, starts, strict=True)]
        return cls(
            _Places(rows),
            known if any(starts) else None,
            _Places(index),
            fresh=not any(starts) and begun.isdisjoint(rows),
        )


@dataclass(frozen=True)
class _Step:
    """One forward, as every mixer sees it.

    Attributes:
        pending: stretches of the tokens that are committed; (R, T) places among the tokens.
        paths: paths of nodes; (R, T) places among the inputs kept in the round.
        nodes: (n,) where the nodes are among the tokens.
        found: (n,) where among the R * T outputs of `paths` that of each node is.
        batch: number of the states at the ends of the paths; None if they are not kept.
        used: the batches of states that are still needed.
    """

    pending: list[_Call]
    paths: _Call | None
    nodes: _Places
    found: _Places
    batch: int | None
    used: set[int]


class _Mixer:
    """One module, the states of its rows, and what came in at the nodes of the round."""

    def __init__(self, module: nn.Module, num_rows: int, resumes: bool):
        self.module = module
        self.index: Any = module.layer_idx
        self.states: dict[int, State] = {}
        self._num_rows = num_rows
        self._resumes = resumes
        self._cache_name = _cache_name(module) or ""
        self._inputs: Tensor | None = None

    def forward(self, hidden_states: Tensor, step: _Step) -> Tensor:
        """The outputs for (B, T, width) hidden states; zeros where the step has no token."""
        tokens = hidden_states.flatten(0, 1)
        outputs = torch.zeros_like(tokens)
        for call in step.pending:
            found, state = self._call(tokens, call)
            outputs[call.index.of(tokens)] = found
            self._commit(call.rows, state)
        if step.paths is not None:
            places = step.nodes.of(tokens)
            new = tokens[places]
            self._inputs = new if self._inputs is None else torch.cat([self._inputs, new])
            found, state = self._call(self._inputs, step.paths)
            outputs[places] = found.flatten(0, 1)[step.found.of(tokens)]
            self.states = {n: kept for n, kept in self.states.items() if n in step.used}
            if step.batch is not None:
                self.states[step.batch] = state
        return outputs.view_as(hidden_states)

    def replay(self, call: _Call) -> None:
        """Commit the state after a path of nodes; without tokens, the one that it begins from."""
        assert self._inputs is not None, "nodes are kept after they have run"
        known = call.index.count == 0
        state = self._gather(call) if known else self._call(self._inputs, call)[1]
        self._commit(call.rows, state)

    def end_round(self) -> None:
        """Forget what came in at the nodes, and the states after them."""
        self._inputs = None
        self.states = {COMMITTED: self.states[COMMITTED]} if COMMITTED in self.states else {}

    def restart(self, row: int) -> None:
        """Begin a sequence: a state of zeros is that of no token."""
        for part in self.states.get(COMMITTED, ()):
            part[row] = 0

    def _call(self, inputs: Tensor, call: _Call) -> tuple[Tensor, State]:
        return self.run(inputs[call.index.of(inputs)], None if call.fresh else self._gather(call))

    def _gather(self, call: _Call) -> State:
        if call.starts is None:
            return [part[call.rows.of(part)] for part in self.states[COMMITTED]]
        chosen = [[part[place] for part in self.states[batch]] for batch, place in call.starts]
        return [torch.stack(parts) for parts in zip(*chosen, strict=True)]

    def _commit(self, rows: _Places, state: State) -> None:
        if COMMITTED not in self.states:
            shapes = ((self._num_rows, *part.shape[1:]) for part in state)
            self.states[COMMITTED] = [p.new_zeros(s) for p, s in zip(state, shapes, strict=True)]
        for mine, part in zip(self.states[COMMITTED], state, strict=True):
            mine[rows.of(mine)] = part

    def run(self, inputs: Tensor, state: State | None) -> tuple[Tensor, State]:
        """Outputs for (R, T, width) inputs from a state, and the state after them.

        The mixer gets a cache of transformers' own, which holds copies: some kernels write into the
        state that they are given.
        """
        layer = LinearAttentionLayer()
        kept = Cache(layers=[layer] * (self.index + 1))
        if state is not None:
            kept.update_conv_state(state[0], self.index)
            for part in state[1:]:
                kept.update_recurrent_state(part, self.index)
        # Nothing before the first token has to be heeded.
        parts = [inputs] if self._resumes or state is None else inputs.split(1, dim=1)
        plain: Any = self.module.forward
        plain = getattr(plain, "plain", plain)
        outputs = torch.cat([plain(p, **{self._cache_name: kept}) for p in parts], dim=1)
        after = (layer.conv_states[0], layer.recurrent_states[0])
        return outputs, [part for part in after if part is not None]

    def load(self, kept: Any) -> None:
        """Take the states of all rows from the layer of a cache."""
        after = (kept.conv_states[0], kept.recurrent_states[0])
        self.states = {COMMITTED: [part.clone() for part in after if part is not None]}

    def export(self, kept: Cache) -> None:
        """Write the states of all rows into a new cache."""
        parts = self.states[COMMITTED]
        kept.update_conv_state(parts[0], self.index)
        for part in parts[1:]:
            kept.update_recurrent_state(part, self.index)


class _Running(threading.local):
    """Whose forward runs in this thread."""

    mixers: RecurrentMixers | None = None


_running = _Running()
_lock = threading.Lock()
# Of mixers whose models are active.
_forwards = OwnForwards()


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
        self._mixers = {id(m): _Mixer(m, num_rows, _resumes(model, m)) for m in found}
        # Rows that have a state.
        self._begun: set[int] = set()
        self._round = _Round()
        self._step: _Step | None = None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Let the mixers of the model ask which generation they run for."""
        with ExitStack() as stack, _lock:
            for mixer in self._mixers.values():
                if not _forwards.join(mixer.module):
                    _forwards.give(mixer.module, _Forward(mixer.module))
                stack.callback(_forwards.leave, mixer.module)
            leave = stack.pop_all()
        try:
            yield
        finally:
            with _lock:
                leave.close()

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
            _running.mixers = before
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
            call = _Call.of(rows, starts, [places for _, _, places in same], self._begun)
            with fast_products():
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
    ) -> _Step:
        groups: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for w in work:
            if w.pending:
                groups[len(w.pending), w.row in self._begun].append(w.row)
        pending = [
            _Call.of(rows, [None] * len(rows), [inputs.pending[row] for row in rows], self._begun)
            for rows in groups.values()
        ]
        with_nodes = [w for w in work if w.nodes]
        nodes = _Places(inputs.nodes)
        if not with_nodes:
            return _Step(pending, None, nodes, nodes, None, {COMMITTED})
        return self._plan_paths(with_nodes, tree, pending, nodes)

    def _plan_paths(
        self, work: Sequence[RowWork], tree: DraftTree, pending: list[_Call], nodes: _Places
    ) -> _Step:
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
        return _Step(
            pending,
            _Call.of(rows, starts, index, begun),
            nodes,
            _Places([found[node] for node in new]),
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
