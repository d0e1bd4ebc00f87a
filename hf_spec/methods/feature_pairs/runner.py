"""Runs a head on packed blocks of pairs, with its own KV cache per row.

A *pair* i is the target's feature of position i and the token t_{i+1} that follows it. The true
pairs of a row are stored in order. Blocks that rest on predicted features go after them and are
overwritten by the next round, which runs the true pairs. `feed` runs the newest true pairs, `grow`
the blocks after them; both pack all rows into one pass. A Falcon head has blocks of k pairs that
see each other whole; EAGLE heads and MTP layers have blocks of one pair.

A recurrent Falcon head may have to run its newest k pairs again. So the LSTM's state after the pair
before the newest k - 1 is kept, and the features of those k - 1.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.common.compat import CACHE_NAME
from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.sampling import distribution
from hf_spec.engine.fast.compiled_layers import CompiledLayers
from hf_spec.engine.fast.cuda_graphs import StepGraphs
from hf_spec.engine.fast.packed_linear import install_packed_linears, use_packed_linears
from hf_spec.engine.forward.attention_span import Segment
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.node_tokens import DeviceTokens
from hf_spec.engine.forward.packing import PreparedStep
from hf_spec.engine.forward.step import PackedStep
from hf_spec.engine.forward.tree_attention import PackedAttention, takes_packed
from hf_spec.engine.models.internal_positions import QueryPositions, scales_queries
from hf_spec.methods.feature_pairs.draft_head import PairHead, State

# Pairs of a prompt that run at once; limits masks and activations.
FEED_CHUNK = 1024


@dataclass
class PairRow:
    """The true pairs of one sequence.

    Attributes:
        slot: its slot in the KV pool.
        features: (n, H), those of the newest pairs.
        first: position of the first pair, above 0 after a reused cache; -1 before there is one.
        num_pairs: number of pairs with a feature.
        stored: number of these with stored keys and values.
        covered: number of pairs that `state` has seen.
        state: the LSTM's state, (2, 1, H) each; None at the start and without an LSTM state.
    """

    slot: int
    features: Tensor
    first: int = -1
    num_pairs: int = 0
    stored: int = 0
    covered: int = 0
    state: State | None = None

    def slice(self, begin: int, end: int) -> Tensor:
        """Return the features of pairs [begin, end)."""
        offset = self.num_pairs - len(self.features)
        return self.features[begin - offset : end - offset]


def extend_rows(rows: Sequence[PairRow], features: Sequence[Tensor]) -> None:
    """Add (n, H) features of the pairs that follow to each row, in one operation for all."""
    pairs = list(zip(rows, features, strict=True))
    if any(row.num_pairs and len(row.features) for row in rows):
        parts = [[row.features, new] if row.num_pairs else [new] for row, new in pairs]
        joined = torch.cat([part for row_parts in parts for part in row_parts])
        features = joined.split([sum(map(len, row_parts)) for row_parts in parts])
    for (row, new), extended in zip(pairs, features, strict=True):
        row.features = extended
        row.num_pairs += len(new)


@dataclass(frozen=True)
class Blocks:
    """The n blocks of a row's next pass, after those of earlier passes.

    Attributes:
        count: n.
        offsets: (all blocks * k,) int64, number of pairs between the true ones and every pair.
        visible: (n * k, all blocks * k) bool, pairs that each pair of this pass sees; None for all.
    """

    count: int
    offsets: Tensor
    visible: Tensor | None


@functools.lru_cache(maxsize=256)
def draft_blocks(parents: tuple[int, ...], count: int, block_size: int) -> Blocks:
    """Return the last `count` of all blocks that rest on predicted features.

    A block sees those on its path, and itself. `parents` are those of the root and of each block,
    in this order, -1 for the root.
    """
    # The tokens do not matter.
    tree = DraftTree.from_rows([([0] * len(parents), parents)])
    visible = tree.ancestor_mask[-count:, 1:]
    if block_size > 1:
        visible = visible.repeat_interleave(block_size, 0).repeat_interleave(block_size, 1)
    first = (torch.tensor(tree.depth[1:]) - 1) * block_size
    offsets = (first[:, None] + torch.arange(block_size)).flatten()
    return Blocks(count, offsets, None if bool(visible.all()) else visible)


# A row and some of its pairs, first and end.
Span = tuple[PairRow, int, int]


class HeadRunner:
    """A head in evaluation mode, with a KV pool for `num_slots` sequences; see `ModelRunner`."""

    def __init__(self, head: PairHead, num_slots: int, expected_length: int = 0):
        self.head = head
        self.pool = KVPool(num_slots)
        self.forwards = 0
        self._size = head.shape.block_size
        self._expected_length = expected_length

    @contextmanager
    def active(self) -> Iterator[HeadRunner]:
        """Prepare the head for packed passes; it is restored when the block ends."""
        with ExitStack() as stack:
            layers = self.head.attention
            check_packed(layers)
            self._attention = PackedAttention(layers)
            stack.enter_context(install_packed_linears(self.head, rounded=True))
            self._layers = stack.enter_context(CompiledLayers.of(layers).active(layers))
            self._graphs = StepGraphs(
                layers,
                self.pool,
                layers.device,
                cache_key=self.pool.num_slots if self._expected_length else None,
                length=self._expected_length,
                owner=self.head,
            )
            stack.callback(self._graphs.close)
            yield self

    @property
    def step_graphs(self) -> StepGraphs:
        """CUDA graphs of the passes; only while active."""
        return self._graphs

    @use_packed_linears(rounded=True)
    def feed(
        self, rows: Sequence[PairRow], texts: Sequence[Sequence[int]], num_masks: int = 0
    ) -> tuple[Tensor, State | None]:
        """Run the new pairs, and at least the newest k, of A rows that have as many.

        `texts` are the tokens of each slot; pair i of a row has the token `first + i + 1`. M mask
        pairs follow in the same pass and are not stored; with them k is 1.

        Returns:
            (A, k + M, H), predictions of the newest k pairs of each row and of the mask pairs; and
            the LSTM's state after them.
        """
        if not self.head.shape.recurrent:
            outputs = self.run_prepared(self.prepare_feed(rows, texts, num_masks))
            return outputs.view(len(rows), -1, outputs.shape[-1]), None
        spans = self._run_long_spans(rows, texts)
        outputs, state = self._run_recurrent(spans, texts)
        self._drop_features(rows)
        parts = outputs.split([end - begin for _, begin, end in spans])
        return torch.stack([part[-self._size :] for part in parts]), state

    def prepare_feed(
        self, rows: Sequence[PairRow], texts: Sequence[Sequence[int]], num_masks: int = 0
    ) -> PreparedStep:
        """Prepare the pass of `feed`, and count its pairs as stored; long prompts run here.

        Its tensors are (T,) tokens and positions on the host, (T, H) features on the device, and
        the indices of the newest pairs.
        """
        prepared = self._prepare_spans(self._run_long_spans(rows, texts), texts, num_masks)
        self._drop_features(rows)
        return prepared

    @use_packed_linears(rounded=True)
    def grow(
        self,
        rows: Sequence[PairRow],
        blocks: Sequence[Blocks],
        tokens: DeviceTokens,
        features: Tensor,
        state: State | None = None,
    ) -> tuple[Tensor, State | None]:
        """Run N blocks of k pairs that rest on predicted features, of rows that were fed before.

        There are (N * k,) tokens, row after row, and of the block before each (N * k, H) predicted
        features and the LSTM's state, (2, N, H) each.

        Returns:
            (N, k, H) predicted features, and the LSTM's state after each block.
        """
        if self.head.shape.recurrent:
            blocks_of = features.unflatten(0, (-1, self._size))
            mixed, state = self.head.mix(tokens.tokens.view(-1, self._size), blocks_of, state)
            outputs = self.attend(mixed.flatten(0, 1), self._block_segments(rows, blocks))
        else:
            outputs = self.run_prepared(self.prepare_grow(rows, blocks, features), tokens, features)
        return outputs.view(-1, self._size, outputs.shape[-1]), state

    def prepare_grow(
        self,
        rows: Sequence[PairRow],
        blocks: Sequence[Blocks],
        like: Tensor,
        num_bytes: int | None = None,
    ) -> PreparedStep:
        """Prepare the pass of `grow` on features `like` these; see also `ModelRunner.prepare`.

        Its tensors are (T,) tokens and positions on the host, (T, H) features on the device.
        """
        step, positions = self._begin(self._block_segments(rows, blocks))
        if num_bytes is not None:
            step.sees = torch.empty(len(positions), num_bytes, dtype=torch.uint8)
        features = like.new_empty(len(positions), like.shape[-1])
        return PreparedStep(step, [torch.zeros_like(positions), positions, features])

    @use_packed_linears(rounded=True)
    def run_prepared(
        self,
        prepared: PreparedStep,
        tokens: DeviceTokens | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """Run a prepared pass; return (T, H) predicted features, of a feed the newest ones.

        `tokens` and `features` are those of `grow`.
        """
        self._layers.begin_step()
        step, tensors = prepared.step, list(prepared.tensors)
        if tokens is not None and features is not None:
            tensors[0], step.sees, tensors[2] = tokens.tokens, tokens.sees, features
        (outputs,) = self._graphs.run(self._compute, tensors, step)
        # The results of a graph end with those of its padding.
        return outputs[: len(tensors[-1])]

    @use_packed_linears(rounded=True)
    def attend(self, mixed: Tensor, segments: Sequence[Segment]) -> Tensor:
        """Run (T, H) mixed pairs in one packed pass; return (T, H) predicted features.

        The pairs of a segment are stored in the last of the slots that it sees.
        """
        step, positions = self._begin(segments)
        self._layers.begin_step()

        def run() -> Tensor:
            # A failed attempt may have marked layers.
            step.written.clear()
            return self._compute([mixed, *self._graphs.put([positions], step)], step)[0]

        return self.pool.retried(run)

    @use_packed_linears(rounded=True)
    def top_tokens(self, outputs: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the most probable tokens of (M, H) features, best first, (M, ranks) int64.

        Also their float32 probabilities, and the whole (M, R) distributions.
        """
        probs = distribution(self.head.head.draft_logits(outputs).float())
        likely, indices = probs.topk(num_ranks, dim=-1)
        return self.head.head.tokens(indices), likely, probs

    def _begin(self, segments: Sequence[Segment]) -> tuple[PackedStep, Tensor]:
        self.forwards += 1
        self.pool.reserve(max(segment.num_keys for segment in segments))
        positions = torch.cat([segment.position for segment in segments])
        return PackedStep(self.pool, segments), positions

    def _compute(self, tensors: Sequence[Tensor], step: PackedStep) -> list[Tensor]:
        """Run tokens at positions with features, or mixed pairs at positions.

        A fourth tensor are the indices of the outputs to return.
        """
        self._layers.refresh()
        pairs, positions, *others = tensors
        mixed = pairs[None]
        if others:
            mixed, _ = self.head.mix(mixed, others[0][None])
        # A 4D mask of one element is passed through as it is: no model builds a mask of its own.
        mask = mixed.new_ones(1, 1, 1, 1, dtype=torch.bool)
        where: dict[str, Any] = {"attention_mask": mask, "position_ids": positions[None]}
        if scales_queries(self.head.attention):
            where[CACHE_NAME] = QueryPositions(positions)
        with self._attention.active():
            outputs = self.head.attend(mixed, spec_step=step, **where)
        step.check(self.head.attention, self.head.shape.num_layers)
        self._layers.end_step(step.written)
        return [outputs[0][others[1]] if len(others) > 1 else outputs[0]]

    def _run_long_spans(
        self, rows: Sequence[PairRow], texts: Sequence[Sequence[int]]
    ) -> list[Span]:
        """Run long prompts in chunks; return the pairs that are left to run."""
        size = self._size

        def span(row: PairRow) -> Span:
            begin = min(row.stored, row.num_pairs - size)
            # The grid of blocks is counted from the newest pair, also where a prompt is cut.
            left = -(-max(0, row.num_pairs - begin - FEED_CHUNK) // size) * size
            return row, begin, row.num_pairs - left

        while long := [chunk for chunk in map(span, rows) if chunk[2] < chunk[0].num_pairs]:
            if self.head.shape.recurrent:
                self._run_recurrent(long, texts)
            else:
                self.run_prepared(self._prepare_spans(long, texts))
        return [span(row) for row in rows]

    def _prepare_spans(
        self, spans: Sequence[Span], texts: Sequence[Sequence[int]], num_masks: int = 0
    ) -> PreparedStep:
        segments = self._pair_segments(spans, num_masks)
        tokens: list[int] = []
        features: list[Tensor] = []
        for row, begin, end in spans:
            tokens += _tokens(texts, row, begin, end)
            features.append(row.slice(begin, end))
            if self.head.mask_pair is not None and num_masks:
                token, feature = self.head.mask_pair
                tokens += [token] * num_masks
                features.append(feature.expand(num_masks, -1))
        joined = features[0] if len(features) == 1 else torch.cat(features)
        step, positions = self._begin(segments)
        newest = torch.tensor(self._newest(spans, num_masks))
        return PreparedStep(step, [torch.tensor(tokens), positions, joined, newest])

    def _run_recurrent(
        self, spans: Sequence[Span], texts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, State]:
        segments = self._pair_segments(spans)
        mixed, state = self._mix(spans, texts)
        return self.attend(mixed, segments), state

    def _pair_segments(self, spans: Sequence[Span], num_masks: int = 0) -> list[Segment]:
        """Return the segments of true pairs, which count as stored, and of mask pairs."""
        segments, start = [], 0
        for row, begin, end in spans:
            segments.append(self.pair_segment(row, begin, end + num_masks, start))
            row.stored, start = end, segments[-1].end
        return segments

    def _newest(self, spans: Sequence[Span], num_masks: int = 0) -> list[int]:
        """Return the indices of the newest k pairs of each span, and of mask pairs after them."""
        ends = accumulate(end - begin + num_masks for _, begin, end in spans)
        count = self._size + num_masks
        return [index for end in ends for index in range(max(0, end - count), end)]

    def _drop_features(self, rows: Sequence[PairRow]) -> None:
        """Drop the features of pairs that do not run again."""
        for row in rows:
            row.features = row.features[len(row.features) - self._size + 1 :]

    def _block_segments(self, rows: Sequence[PairRow], blocks: Sequence[Blocks]) -> list[Segment]:
        segments: list[Segment] = []
        for row, row_blocks in zip(rows, blocks, strict=True):
            start = segments[-1].end if segments else 0
            segments.append(self._block_segment(row, row_blocks, start))
        return segments

    def _mix(self, spans: Sequence[Span], texts: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """Return (T, H) mixed pairs of the spans, and the states after them."""
        device = self.head.attention.device
        parts: list[Tensor] = []
        states: list[State] = []
        for row, begin, end in spans:
            before = row.covered
            middle = end - self._size + 1
            for first, last in ((before, middle), (middle, end)):
                if first == last:
                    continue
                ids = torch.tensor([_tokens(texts, row, first, last)]).to(device)
                state = row.state if first == before else states.pop()
                mixed, state = self.head.mix(ids, row.slice(first, last)[None], state)
                assert state is not None, "a recurrent head carries its state"
                parts.append(mixed[0, max(begin - first, 0) :])
                states.append(state)
                if last == middle:
                    row.state, row.covered = state, middle
        return torch.cat(parts), joined_states(states)

    def pair_segment(self, row: PairRow, begin: int, end: int, start: int) -> Segment:
        """Return pairs that see all before them and their block; blocks end at the last pair."""
        pairs, seen = torch.arange(begin, end), None
        if end - begin > self._size:
            block_end = end - (end - 1 - pairs) // self._size * self._size
            seen = pairs < block_end[:, None]
        return newest_segment(row.slot, start, begin, pairs + row.first, end - begin, seen)

    def _block_segment(self, row: PairRow, blocks: Blocks, start: int) -> Segment:
        """Return blocks that see all true pairs, the blocks on their path, and themselves."""
        positions = blocks.offsets + row.num_pairs + row.first
        count = blocks.count * self._size
        return newest_segment(row.slot, start, row.num_pairs, positions, count, blocks.visible)


def newest_segment(
    slot: int, start: int, prefix: int, positions: Tensor, count: int, seen: Tensor | None
) -> Segment:
    """Return the segment of the last `count` of the tokens at `positions`.

    Those are stored after `prefix` others of the slot, which have the positions before the first.
    `seen` are the ones that each token of the segment sees; None for all.
    """
    num_keys = prefix + len(positions)
    return Segment(
        slot=slot,
        start=start,
        end=start + count,
        num_keys=num_keys,
        position=positions[-count:],
        last_position=int(positions[-count:].max()),
        tail_position=positions,
        seen=seen,
        prefix=prefix,
        first_position=int(positions[0]) - prefix,
        cache_indices=range(num_keys - count, num_keys),
    )


def check_packed(model: PreTrainedModel) -> None:
    """Raise `UnsupportedError` if the model's layers cannot run the blocks of a head."""
    if not takes_packed(model):
        raise UnsupportedError(
            f"{type(model).__name__} takes no attention function, which the blocks of a head "
            "require; use spec_strategy='draft' or 'tree'"
        )


def joined_states(states: Sequence[State]) -> State:
    """Return the LSTM states of several pairs as one, in their order."""
    hidden, cell = (torch.cat(kind, dim=1) for kind in zip(*states, strict=True))
    return hidden, cell


def _tokens(texts: Sequence[Sequence[int]], row: PairRow, begin: int, end: int) -> list[int]:
    """Return the tokens of pairs [begin, end)."""
    return list(texts[row.slot][row.first + begin + 1 : row.first + end + 1])
