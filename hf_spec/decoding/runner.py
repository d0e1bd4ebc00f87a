"""Runs one Hugging Face model on draft trees, with its own keys and values per row.

The same class serves the target and draft models. A row's sequence splits in three: tokens whose
keys and values are stored, *pending* tokens (committed, not stored; the last of them is the root of
the next tree), and the nodes of the tree. `forward` runs whatever is not stored yet, so the prompt,
a reused cache, a draft model that has to catch up and the level-by-level growth of a draft tree are
one mechanism, and a prompt shares its first forward with the first draft.
"""

from __future__ import annotations

import inspect
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hf_spec.decoding import attention
from hf_spec.decoding.alibi import tree_alibi
from hf_spec.decoding.attention import PackedStep, Segment
from hf_spec.decoding.cpu_linear import fast_cpu_linears
from hf_spec.decoding.kv_cache import KVPool, PoolCache
from hf_spec.decoding.tree import DraftTree
from hf_spec.errors import UnsupportedError

# A long prompt is run in stretches of this many tokens per row; bounds masks and activations.
PREFILL_CHUNK = 1024

# Attention interface or not, these take the rectangular path: layers of the first drop the keyword
# arguments that attention functions need, the second attends twice per layer, with two values.
RECTANGULAR_ONLY = {"nemotron", "diffllama"}


@dataclass
class ForwardOutput:
    """Result of a forward.

    Attributes:
        logits: (M, V) in the model's dtype, one row per node that was run, in tree order.
        hidden: hidden-state index -> (T, hidden size) of all tokens run, pending ones included.
        pending: per row (start, count) of its pending tokens among the T, without the root.
        nodes: (M,) place of each node among the T.
    """

    logits: Tensor
    hidden: dict[int, Tensor] = field(default_factory=dict)
    pending: list[tuple[int, int]] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)


@dataclass
class _RowWork:
    """What one row contributes to a forward: pending tokens (root excluded), then tree nodes."""

    row: int
    stored: int
    pending: list[int]
    nodes: list[int]
    offsets: list[int]

    @property
    def base(self) -> int:
        """Storage place and position of the root."""
        return self.stored + len(self.pending)

    @property
    def num_tokens(self) -> int:
        return len(self.pending) + len(self.nodes)

    @property
    def places(self) -> list[int]:
        """Storage place of every token, in the order they run."""
        return [*range(self.stored, self.base), *(self.base + offset for offset in self.offsets)]


class ModelRunner:
    """A model, its key-value pool and the forward pass over packed trees.

    Args:
        model: a decoder-only causal language model.
        num_rows: B, how many sequences share the pool.
        hidden_layers: indices into `hidden_states` that each forward returns.
    """

    def __init__(self, model: PreTrainedModel, num_rows: int, hidden_layers: Sequence[int] = ()):
        self.model = model
        self.pool = KVPool(num_rows)
        self.stored = [0] * num_rows
        self.forwards = 0
        self.tokens_run = 0
        self._hidden_layers = list(hidden_layers)
        # Per row: storage place of the root and the offsets of the nodes stored since `keep`.
        self._round: dict[int, tuple[int, set[int]]] = {}
        self._packed = False
        self._cache = PoolCache(self.pool, model.config.get_text_config().num_hidden_layers)
        parameters = inspect.signature(model.forward).parameters
        self._keeps_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        return self.model.device

    @contextmanager
    def active(self) -> Iterator[ModelRunner]:
        """Prepare the model for tree forwards; it is as it was found when the block ends."""
        with ExitStack() as stack:
            self._packed = stack.enter_context(_packed_attention(self.model))
            stack.enter_context(fast_cpu_linears(self.model))
            yield self

    def forward(
        self,
        tree: DraftTree,
        sequences: Sequence[Sequence[int]],
        nodes: Sequence[int] | None = None,
    ) -> ForwardOutput:
        """Run the pending tokens of every row in the tree, and tree nodes.

        Args:
            tree: the draft tree; each row's root is the last token of its sequence.
            sequences: per row all committed tokens, without padding.
            nodes: which nodes to run, ascending; all of them by default. Their ancestors must be
                among them or have run since the last `keep`.

        Returns:
            Logits of the nodes, hidden states of everything that ran.
        """
        wanted = range(tree.num_nodes) if nodes is None else nodes
        work = self._plan(tree, sequences, wanted)
        longest = max((len(w.pending) for w in work), default=0)
        while longest > PREFILL_CHUNK:
            self._run([self._cut(w) for w in work if len(w.pending) > PREFILL_CHUNK], None)
            work = self._plan(tree, sequences, wanted)
            longest = max(len(w.pending) for w in work)
        output = self._run(work, tree)
        for w in work:
            self.stored[w.row] = w.base
            held = self._round.setdefault(w.row, (w.base, set()))[1]
            held.update(w.offsets)
        return output

    def keep(self, paths: Sequence[Sequence[int]]) -> None:
        """Keep the keys and values of each row's accepted path, moved together in place.

        Args:
            paths: per row the accepted nodes in order, the root left out, each counted from the
                row's root. A node that was never run ends the kept part; what follows is pending.
        """
        for row, (base, held) in self._round.items():
            path = [0, *paths[row]]
            kept = next((i for i, offset in enumerate(path) if offset not in held), len(path))
            moved = next((i for i in range(kept) if path[i] != i), kept)
            if moved < kept:
                self.pool.move(row, [base + offset for offset in path[moved:kept]], base + moved)
            self.stored[row] = base + kept
        self._round.clear()

    def _plan(
        self, tree: DraftTree, sequences: Sequence[Sequence[int]], nodes: Sequence[int]
    ) -> list[_RowWork]:
        host = tree.host
        work = []
        for row in range(tree.num_rows):
            mine = host.nodes(row)
            chosen = list(nodes[bisect_left(nodes, mine.start) : bisect_left(nodes, mine.stop)])
            if chosen:
                stored = self.stored[row]
                pending = list(sequences[row][stored : len(sequences[row]) - 1])
                offsets = [node - mine.start for node in chosen]
                work.append(_RowWork(row, stored, pending, chosen, offsets))
        return work

    def _cut(self, work: _RowWork) -> _RowWork:
        part = _RowWork(work.row, work.stored, work.pending[:PREFILL_CHUNK], [], [])
        self.stored[work.row] += len(part.pending)
        return part

    def _run(self, work: list[_RowWork], tree: DraftTree | None) -> ForwardOutput:
        # One place more than needed: the padding of the rectangular path goes there.
        self.pool.reserve(max(w.base + self._width(w) for w in work) + 1)
        self.forwards += 1
        self.tokens_run += sum(w.num_tokens for w in work)
        if self._packed:
            return self._run_packed(work, tree)
        return self._run_rectangular(work, tree)

    def _width(self, work: _RowWork) -> int:
        """Places behind the root that the row's nodes use, stored ones included."""
        held = self._round.get(work.row, (0, set()))[1]
        return max([*held, *work.offsets], default=-1) + 1

    def _visible(self, work: _RowWork, tree: DraftTree) -> Tensor:
        """(nodes, width) bool: which of the row's nodes each chosen node descends from."""
        return tree.ancestor_mask[_span(work.nodes), : self._width(work)]

    def _run_packed(self, work: list[_RowWork], tree: DraftTree | None) -> ForwardOutput:
        tokens: list[int] = []
        positions: list[int] = []
        writes: list[tuple[int, int, int, slice | Tensor]] = []
        segments: list[Segment] = []
        output = ForwardOutput(torch.empty(0))
        for w in work:
            start = len(tokens)
            tokens.extend(w.pending)
            positions.extend(range(w.stored, w.base))
            output.pending.append((start, len(w.pending)))
            if w.pending:
                segments.append(_chain_segment(w, start))
            if tree is not None and w.nodes:
                begin = len(tokens)
                tokens.extend(tree.host.tokens[node] for node in w.nodes)
                positions.extend(w.base + tree.host.depth[node] for node in w.nodes)
                output.nodes.extend(range(begin, len(tokens)))
                segments.append(self._tree_segment(w, begin, positions[begin:], tree))
            writes.append((w.row, start, len(tokens), _span(w.places)))
        step = PackedStep(self.pool, writes, segments)
        kwargs: dict[str, object] = {"spec_step": step, "use_cache": False}
        if self._takes_positions:
            kwargs["position_ids"] = torch.tensor([positions], device=self.device)
        # A 4D mask of one element is passed through as it is: no model builds a mask of its own.
        mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=self.device)
        nodes = torch.tensor(output.nodes, dtype=torch.long, device=self.device)
        if self._keeps_logits:
            kwargs["logits_to_keep"] = nodes
        logits = self._call(torch.tensor([tokens]), mask, output, kwargs)[0]
        if len(step.written) != len(self._cache.layers):
            raise UnsupportedError(
                f"{type(self.model).__name__} ran tree attention in {len(step.written)} of its "
                f"{len(self._cache.layers)} layers, so its tokens would be wrong; generate without "
                "spec_strategy"
            )
        output.logits = logits if self._keeps_logits else logits[nodes]
        return output

    def _tree_segment(
        self, work: _RowWork, start: int, positions: list[int], tree: DraftTree
    ) -> Segment:
        width = self._width(work)
        row_start = tree.host.row_start[work.row]
        depths = tree.host.depth[row_start : row_start + width]
        position = torch.tensor(positions)
        key_position = torch.tensor([*range(work.base), *(work.base + d for d in depths)])
        visible = None
        if width > 1:
            below = self._visible(work, tree)
            visible = below.new_ones(len(work.nodes), work.base + width)
            visible[:, work.base :] = below
            position, key_position = position.to(below.device), key_position.to(below.device)
        return Segment(
            work.row,
            start,
            start + len(work.nodes),
            work.base + width,
            position,
            max(positions),
            key_position,
            visible,
        )

    def _run_rectangular(self, work: list[_RowWork], tree: DraftTree | None) -> ForwardOutput:
        """The same for models without the attention interface: (B, T) rectangles, right-aligned."""
        num_rows, length = self.pool.num_slots, max(w.num_tokens for w in work)
        visible_keys = max(w.base + self._width(w) for w in work)
        tokens = torch.zeros(num_rows, length, dtype=torch.long)
        positions = torch.zeros_like(tokens)
        places = torch.full_like(tokens, self.pool.capacity - 1)
        # Padding looks at the first key only, so that its softmax stays finite; nobody reads it.
        visible = torch.zeros(num_rows, length, visible_keys, dtype=torch.bool)
        visible[:, :, 0] = True
        key_positions = torch.arange(visible_keys).repeat(num_rows, 1)
        output = ForwardOutput(torch.empty(0))
        for w in work:
            first = length - w.num_tokens
            output.pending.append((w.row * length + first, len(w.pending)))
            chain = torch.arange(w.stored, w.base)
            nodes = slice(first + len(w.pending), length)
            tokens[w.row, first : nodes.start] = torch.tensor(w.pending, dtype=torch.long)
            positions[w.row, first : nodes.start] = chain
            places[w.row, first : nodes.start] = chain
            visible[w.row, first : nodes.start] = torch.arange(visible_keys) <= chain[:, None]
            if tree is None or not w.nodes:
                continue
            width = self._width(w)
            row_start = tree.host.row_start[w.row]
            depths = torch.tensor(tree.host.depth[row_start : row_start + width])
            offsets = torch.tensor(w.offsets)
            tokens[w.row, nodes] = torch.tensor([tree.host.tokens[node] for node in w.nodes])
            positions[w.row, nodes] = w.base + depths[offsets]
            places[w.row, nodes] = w.base + offsets
            visible[w.row, nodes, : w.base] = True
            visible[w.row, nodes, w.base : w.base + width] = self._visible(w, tree).cpu()
            key_positions[w.row, w.base : w.base + width] = w.base + depths
            output.nodes.extend(range(w.row * length + nodes.start, (w.row + 1) * length))
        self._cache.place(places.to(self.device), visible_keys)
        mask = visible[:, None].to(self.device)
        if self.model.config._attn_implementation == "eager":
            additive = torch.zeros(mask.shape, dtype=self.model.dtype, device=self.device)
            mask = additive.masked_fill_(~mask, torch.finfo(self.model.dtype).min)
        kwargs: dict[str, object] = {"past_key_values": self._cache, "use_cache": True}
        if self._takes_positions:
            kwargs["position_ids"] = positions.to(self.device)
        kept = max(len(w.nodes) for w in work)
        if self._keeps_logits:
            kwargs["logits_to_keep"] = max(kept, 1)
        with tree_alibi(self.model, key_positions.to(self.device)):
            result = self._call(tokens, mask, output, kwargs)
        # The nodes of a row are its last columns, with or without `logits_to_keep`.
        columns = result.shape[1]
        picked = [
            w.row * columns + columns - len(w.nodes) + i for w in work for i in range(len(w.nodes))
        ]
        output.logits = result.flatten(0, 1)[torch.tensor(picked, dtype=torch.long)]
        return output

    def _call(
        self, tokens: Tensor, mask: Tensor, output: ForwardOutput, kwargs: dict[str, object]
    ) -> Tensor:
        if self._hidden_layers:
            kwargs["output_hidden_states"] = self._hidden_layers
        result = self.model(
            input_ids=tokens.to(self.device), attention_mask=mask, return_dict=True, **kwargs
        )
        for layer in self._hidden_layers:
            output.hidden[layer] = result.hidden_states[layer].flatten(0, 1)
        return result.logits


def _span(places: Sequence[int]) -> slice | Tensor:
    """Indices as a slice wherever they are consecutive, which avoids a gather."""
    if places[-1] - places[0] + 1 == len(places):
        return slice(places[0], places[-1] + 1)
    return torch.tensor(places)


def _chain_segment(work: _RowWork, start: int) -> Segment:
    """Pending tokens see everything before them, and themselves."""
    position = torch.arange(work.stored, work.base)
    key_position = torch.arange(work.base)
    visible = key_position[None, :] <= position[:, None] if len(work.pending) > 1 else None
    return Segment(
        work.row,
        start,
        start + len(work.pending),
        work.base,
        position,
        work.base - 1,
        key_position,
        visible,
    )


@contextmanager
def _packed_attention(model: PreTrainedModel) -> Iterator[bool]:
    """Switch the model to the `hf_spec` attention; yields whether it took it."""
    taken = model._supports_attention_backend and model._can_set_attn_implementation()
    if not taken or model.config.model_type in RECTANGULAR_ONLY:
        yield False
        return
    # Layers borrowed from another model look the name up in that model's config.
    configs = {id(c): c for c in (getattr(m, "config", None) for m in model.modules())}
    before = [
        (config, config._attn_implementation_internal)
        for config in configs.values()
        if isinstance(config, PreTrainedConfig)
    ]
    try:
        model.set_attn_implementation(attention.NAME)
        for config, _ in before:
            config._attn_implementation_internal = attention.NAME
        yield True
    finally:
        for config, implementation in before:
            config._attn_implementation_internal = implementation
