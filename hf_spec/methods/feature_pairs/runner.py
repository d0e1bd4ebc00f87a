"""Runs a head on packed blocks of pairs, with keys and values of its own per row.

A row's *pairs* (see `pair_rows`) are stored in order; blocks that rest on predicted features go
after them and are overwritten by the next round, which feeds the true pairs instead. `feed` runs
the newest true pairs, `grow` the blocks after them. Both pack all rows into one forward. A Falcon
head has blocks of k pairs that see each other whole; with blocks of one pair this is what EAGLE's
heads and MTP layers are run by.

How the state of a Falcon head's recurrent LSTM is kept: the newest k pairs may have to be fed
again, so what is kept is the state after the pair before the newest k - 1, and the features of
those k - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

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
from hf_spec.engine.forward.device_tokens import DeviceTokens
from hf_spec.engine.forward.kv_pool import KVPool
from hf_spec.engine.forward.tree_attention import PackedAttention, PackedStep, takes_packed
from hf_spec.engine.models.query_scaling import TokenPlaces, scales_by_place
from hf_spec.methods.feature_pairs.rows import PairRow, State

# Pairs of a prompt that run at once; bounds masks and activations.
FEED_CHUNK = 1024

# A row and some of its pairs, first and end.
Span = tuple[PairRow, int, int]


class PairShape(Protocol):
    """How many pairs a block has, how many layers attend, and whether a state is carried."""

    @property
    def block_size(self) -> int: ...  # noqa: D102
    @property
    def num_layers(self) -> int: ...  # noqa: D102
    @property
    def recurrent(self) -> bool: ...  # noqa: D102


class PairHead(Protocol):
    """A head that predicts features from pairs of a token and a feature.

    Attributes:
        shape: of its blocks.
        hidden_size: H, the width of its features.
        head: reads tokens off the features that it predicts; a `FewTokensHead` or the like.
        attention: a model that has its layers, each of which takes an attention function.
    """

    hidden_size: int
    head: Any
    attention: Any

    @property
    def shape(self) -> PairShape: ...  # noqa: D102

    def mix(
        self, tokens: Tensor, features: Tensor, state: State | None = None
    ) -> tuple[Tensor, State | None]:
        """(S, L) int64 t_{i+1} and (S, L, H) features -> (S, L, M) mixed pairs, and the state."""

    def attend(self, mixed: Tensor, **attention: Any) -> Tensor:
        """(B, T, M) mixed pairs see each other -> (B, T, H) predicted features.

        `attention` has `attention_mask`, `position_ids` and `spec_step`, as layers take them.
        """


@dataclass(frozen=True)
class MaskTokens:
    """Pairs that stand for tokens to come, after the newest true one of every row.

    Attributes:
        token: of each.
        features: (M, H).
    """

    token: int
    features: Tensor


@dataclass(frozen=True)
class Blocks:
    """Blocks of one pass of a row.

    Attributes:
        begin: blocks of earlier passes that rest on predicted features.
        count: blocks n of this pass.
        depth: how many pairs lie between the true ones and each block of this pass.
        offsets: ((begin + n) * k,) int64, how many lie between the true ones and each pair.
        visible: (n * k, (begin + n) * k) bool, which pairs of these blocks each pair sees; None
            for all.
    """

    begin: int
    count: int
    depth: int
    offsets: Tensor
    visible: Tensor | None


class HeadRunner:
    """A head in evaluation mode, its key-value pool for `num_slots` sequences, and its passes.

    Args:
        head: the head.
        num_slots: sequences that it drafts for.
        expected_length: see `ModelRunner`.
    """

    def __init__(self, head: PairHead, num_slots: int, expected_length: int = 0):
        self.head = head
        self.pool = KVPool(num_slots)
        self.forwards = 0
        self._size = head.shape.block_size
        self._expected_length = expected_length

    @contextmanager
    def active(self) -> Iterator[HeadRunner]:
        """Prepare the head for packed passes; it is as it was found when the block ends."""
        with ExitStack() as stack:
            check_packed(self.head.attention)
            self._attention = PackedAttention(self.head.attention)
            head: Any = self.head
            stack.enter_context(install_packed_linears(head, rounded=True))
            layers = self.head.attention
            self._layers = stack.enter_context(CompiledLayers.of(layers).active(layers))
            self._graphs = StepGraphs(
                layers,
                self.pool,
                layers.device,
                cache_key=self.pool.num_slots if self._expected_length else None,
                length=self._expected_length,
                owner=head,
            )
            stack.callback(self._graphs.close)
            yield self

    @use_packed_linears(rounded=True)
    def feed(
        self,
        rows: Sequence[PairRow],
        texts: Sequence[Sequence[int]],
        ahead: MaskTokens | None = None,
    ) -> tuple[Tensor, State | None]:
        """Run the pairs that are new, and at least the newest k, of rows that have as many.

        `texts` are the tokens of each slot; pair i of a row has the token `first + i + 1`. The M
        pairs `ahead` follow in the same pass and are not kept; a head of blocks takes none.
        Returned are (A, k + M, H), what the newest k pairs of each row and these predict, and the
        LSTM's state after them.
        """
        size = self._size
        extra = 0 if ahead is None else len(ahead.features)

        def span(row: PairRow) -> Span:
            begin = min(row.stored, row.num_pairs - size)
            # The grid of blocks is counted from the newest pair, also where a prompt is cut.
            left = -(-max(0, row.num_pairs - begin - FEED_CHUNK) // size) * size
            return row, begin, row.num_pairs - left

        while long := [one for one in map(span, rows) if one[2] < one[0].num_pairs]:
            self._stretch(long, texts)
        spans = [span(row) for row in rows]
        outputs, state = self._stretch(spans, texts, ahead)
        for row in rows:
            row.features = row.features[len(row.features) - size + 1 :]
        parts = outputs.split([end - first + extra for _, first, end in spans])
        return torch.stack([part[-size - extra :] for part in parts]), state

    @use_packed_linears(rounded=True)
    def grow(
        self,
        rows: Sequence[PairRow],
        blocks: Blocks,
        tokens: Tensor,
        features: Tensor,
        state: State | None,
    ) -> tuple[Tensor, State | None]:
        """Run blocks that rest on predicted features, of A rows that were fed before.

        They get (A, n, k) int64 tokens, and of the block before each the (A, n, k, H) features that
        it predicted and the LSTM's state after it, (2, A * n, H) each.

        Returns:
            (A, n, k, H), the features they predict, and the LSTM's state after each block.
        """
        if not self.head.shape.recurrent:
            mine = [blocks] * len(rows)
            given = DeviceTokens(tokens.flatten())
            outputs = self.grow_each(rows, mine, given, features.flatten(0, 2))
        else:
            length = blocks.count * self._size
            segments = [self._block_segment(row, blocks, i * length) for i, row in enumerate(rows)]
            mixed, state = self.head.mix(tokens.flatten(0, 1), features.flatten(0, 1), state)
            outputs = self.attend(mixed.flatten(0, 1), segments)
        return outputs.view(len(rows), blocks.count, self._size, -1), state

    @use_packed_linears(rounded=True)
    def grow_each(
        self,
        rows: Sequence[PairRow],
        blocks: Sequence[Blocks],
        given: DeviceTokens,
        features: Tensor,
    ) -> Tensor:
        """The same with blocks of each row its own, of a head that carries no state.

        (T,) given tokens and (T, H) features, row after row -> (T, H) predicted features.
        """
        segments: list[Segment] = []
        for row, mine in zip(rows, blocks, strict=True):
            start = segments[-1].end if segments else 0
            segments.append(self._block_segment(row, mine, start))
        return self._run(given, features, segments)

    @use_packed_linears(rounded=True)
    def attend(self, mixed: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One packed pass over (T, H) mixed pairs -> (T, H) predicted features.

        The pairs of a segment are stored as the last of the places that it looks at.
        """
        step, positions = self._begin(segments)
        (positions,) = self._graphs.put([positions], step)
        return self._attend(mixed, positions, step)

    @use_packed_linears(rounded=True)
    def lists(self, outputs: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens of (M, H) predicted features: (M, ranks) int64, best first.

        Also (M, ranks) float32 their probabilities among the tokens that the head knows, and all
        of those, (M, R).
        """
        probs = distribution(self.head.head.known(outputs).float())
        likely, places = probs.topk(num_ranks, dim=-1)
        return self.head.head.tokens(places), likely, probs

    def _begin(self, segments: Sequence[Segment]) -> tuple[PackedStep, Tensor]:
        self.forwards += 1
        self._layers.begin_step()
        writes = [
            (s.slot, s.start, s.end, slice(s.num_keys - s.end + s.start, s.num_keys))
            for s in segments
        ]
        self.pool.reserve(max(segment.num_keys for segment in segments))
        positions = torch.cat([segment.position for segment in segments])
        return PackedStep(self.pool, writes, segments), positions

    def _attend(self, mixed: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        # A 4D mask of one element is passed through as it is: no model builds a mask of its own.
        mask = mixed.new_ones(1, 1, 1, 1, dtype=torch.bool)
        where: dict[str, Any] = {"attention_mask": mask, "position_ids": positions[None]}
        if scales_by_place(self.head.attention):
            where[CACHE_NAME] = TokenPlaces(positions)
        with self._attention.chosen():
            outputs = self.head.attend(mixed[None], spec_step=step, **where)
        step.check(self.head.attention, self.head.shape.num_layers)
        self._layers.end_step(step.written)
        return outputs[0]

    def _run(self, given: DeviceTokens, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One packed pass over pairs that carry no state: (T,) and (T, H) -> (T, H)."""
        step, positions = self._begin(segments)
        step.sees = given.sees
        (outputs,) = self._graphs.run(self._compute, [given.tokens, positions, features], step)
        return outputs[: len(given.tokens)]

    def _compute(self, tensors: list[Tensor], step: PackedStep) -> list[Tensor]:
        tokens, positions, features = tensors
        mixed, _ = self.head.mix(tokens[None], features[None])
        return [self._attend(mixed[0], positions, step)]

    def _stretch(
        self,
        spans: Sequence[Span],
        texts: Sequence[Sequence[int]],
        ahead: MaskTokens | None = None,
    ) -> tuple[Tensor, State | None]:
        segments, start = [], 0
        extra = 0 if ahead is None else len(ahead.features)
        for row, begin, end in spans:
            segments.append(self.pair_segment(row, begin, end + extra, start))
            row.stored, start = end, segments[-1].end
        if self.head.shape.recurrent:
            mixed, state = self._mix(spans, texts)
            return self.attend(mixed, segments), state
        tokens: list[int] = []
        features: list[Tensor] = []
        for row, begin, end in spans:
            tokens += _tokens(texts, row, begin, end)
            features.append(row.slice(begin, end))
            if ahead is not None:
                tokens += [ahead.token] * extra
                features.append(ahead.features)
        joined = features[0] if len(features) == 1 else torch.cat(features)
        return self._run(DeviceTokens(torch.tensor(tokens)), joined, segments), None

    def _mix(self, spans: Sequence[Span], texts: Sequence[Sequence[int]]) -> tuple[Tensor, State]:
        """(T, H) mixed pairs of the spans, and the states after them."""
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
        return torch.cat(parts), joined(states)

    def pair_segment(self, row: PairRow, begin: int, end: int, start: int) -> Segment:
        """Pairs see everything before them and their block, blocks counted from the last pair."""
        mine, seen = torch.arange(begin, end), None
        if end - begin > self._size:
            block_end = end - (end - 1 - mine) // self._size * self._size
            seen = mine < block_end[:, None]
        position = mine + row.first
        return Segment(
            slot=row.slot,
            start=start,
            end=start + end - begin,
            num_keys=end,
            position=position,
            last_position=end - 1 + row.first,
            tail_position=position,
            seen=seen,
            prefix=begin,
            first_position=row.first,
        )

    def _block_segment(self, row: PairRow, blocks: Blocks, start: int) -> Segment:
        """Blocks see all true pairs, the blocks they descend from, and themselves."""
        pairs, length = row.num_pairs, blocks.count * self._size
        position = blocks.offsets + pairs + row.first
        return Segment(
            slot=row.slot,
            start=start,
            end=start + length,
            num_keys=pairs + len(position),
            position=position[-length:],
            last_position=row.first + pairs + blocks.depth + self._size - 1,
            tail_position=position,
            seen=blocks.visible,
            prefix=pairs,
            first_position=row.first,
        )


def check_packed(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cannot run the blocks of a head."""
    if not takes_packed(model):
        raise UnsupportedError(
            f"{type(model).__name__} takes no attention function, which the blocks of a head "
            "need; use spec_strategy='draft' or 'tree'"
        )


def joined(states: Sequence[State]) -> State:
    """LSTM states of several pairs as one, in their order."""
    hidden, cell = (torch.cat(kind, dim=1) for kind in zip(*states, strict=True))
    return hidden, cell


def _tokens(texts: Sequence[Sequence[int]], row: PairRow, begin: int, end: int) -> list[int]:
    """The tokens of pairs [begin, end)."""
    return list(texts[row.slot][row.first + begin + 1 : row.first + end + 1])
