"""Runs a Falcon head on packed blocks, with keys and values of its own per row.

A row's *pairs* (see `falcon_head`) are stored in order; blocks that rest on predicted features go
after them and are overwritten by the next round, which feeds the true pairs instead. `feed` runs
the newest true pairs, `grow` the blocks after them. Both pack all rows into one forward.

How the state of a recurrent LSTM is kept: the newest k pairs may have to be fed again, so what is
kept is the state after the pair before the newest k - 1, and the features of those k - 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_spec.decoding.token_sampling import distribution
from hf_spec.errors import UnsupportedError
from hf_spec.execution.attention import PackedAttention, PackedStep, takes_packed
from hf_spec.execution.cpu_linear import fast_cpu_linears, fast_products
from hf_spec.execution.kv_cache import KVPool
from hf_spec.execution.segment import Segment
from hf_spec.execution.step_graphs import StepGraphs
from hf_spec.execution.token_places import TokenPlaces, scales_by_place
from hf_spec.models.falcon_head import FalconHead, State

# Pairs of a prompt that run at once; bounds masks and activations.
FEED_CHUNK = 1024


@dataclass
class PairRow:
    """The true pairs of one sequence.

    Attributes:
        slot: of the pool.
        features: (n, H), those of the newest pairs.
        first: position of the first pair, above 0 where a text began in a reused cache.
        num_pairs: how many have a known feature, `stored` of them keys and values.
        covered: how many the LSTM's kept state has seen.
        state: that state, (2, 1, H) each; None at the start, and where nothing is carried.
    """

    slot: int
    features: Tensor
    first: int
    num_pairs: int = 0
    stored: int = 0
    covered: int = 0
    state: State | None = None

    def extend(self, features: Tensor) -> None:
        """Add (n, H) features of the pairs that follow."""
        self.features = torch.cat([self.features, features]) if self.num_pairs else features
        self.num_pairs += len(features)

    def slice(self, begin: int, end: int) -> Tensor:
        """The features of pairs [begin, end)."""
        offset = self.num_pairs - len(self.features)
        return self.features[begin - offset : end - offset]


# A row and some of its pairs, first and end.
Span = tuple[PairRow, int, int]


@dataclass(frozen=True)
class Blocks:
    """Blocks of one pass, the same for every row.

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
    """A head in evaluation mode, its key-value pool for `num_slots` sequences, and its passes."""

    def __init__(self, head: FalconHead, num_slots: int):
        self.head = head
        self.pool = KVPool(num_slots)
        self.forwards = 0
        self._size = head.shape.block_size
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=head.attention.device)

    @contextmanager
    def active(self) -> Iterator[HeadRunner]:
        """Prepare the head for packed passes; it is as it was found when the block ends."""
        with ExitStack() as stack:
            check_packed(self.head.attention)
            self._attention = PackedAttention(self.head.attention)
            stack.enter_context(fast_cpu_linears(self.head))
            self._graphs = StepGraphs(self.head.attention, self.pool, self._mask.device)
            stack.callback(self._graphs.clear)
            yield self

    @fast_products()
    def feed(
        self, rows: Sequence[PairRow], texts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, State | None]:
        """Run the pairs that are new, and at least the newest k, of rows that have as many.

        `texts` are the tokens of each slot; pair i of a row has the token `first + i + 1`. Returned
        are (A, k, H), what the newest k pairs of each row predict, and the LSTM's state after them.
        """
        size = self._size

        def span(row: PairRow) -> Span:
            begin = min(row.stored, row.num_pairs - size)
            # The grid of blocks is counted from the newest pair, also where a prompt is cut.
            left = -(-max(0, row.num_pairs - begin - FEED_CHUNK) // size) * size
            return row, begin, row.num_pairs - left

        while long := [one for one in map(span, rows) if one[2] < one[0].num_pairs]:
            self._stretch(long, texts)
        spans = [span(row) for row in rows]
        outputs, state = self._stretch(spans, texts)
        for row in rows:
            row.features = row.features[len(row.features) - size + 1 :]
        parts = outputs.split([end - first for _, first, end in spans])
        return torch.stack([part[-size:] for part in parts]), state

    @fast_products()
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
        length = blocks.count * self._size
        segments = [self._block_segment(row, blocks, i * length) for i, row in enumerate(rows)]
        if self.head.shape.recurrent:
            mixed, state = self.head.mix(tokens.flatten(0, 1), features.flatten(0, 1), state)
            outputs = self.attend(mixed.flatten(0, 1), segments)
        else:
            outputs = self._run(tokens.flatten(), features.flatten(0, 2), segments)
        return outputs.view(len(rows), blocks.count, self._size, -1), state

    @fast_products()
    def attend(self, mixed: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One packed pass over (T, H) mixed pairs -> (T, H) predicted features.

        The pairs of a segment are stored as the last of the places that it looks at.
        """
        step, positions = self._begin(segments)
        (positions,) = self._graphs.put([positions], step)
        return self._attend(mixed, positions, step)

    @fast_products()
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
        writes = [
            (s.slot, s.start, s.end, slice(s.num_keys - s.end + s.start, s.num_keys))
            for s in segments
        ]
        self.pool.reserve(max(segment.num_keys for segment in segments))
        positions = torch.cat([segment.position for segment in segments])
        return PackedStep(self.pool, writes, segments), positions

    def _attend(self, mixed: Tensor, positions: Tensor, step: PackedStep) -> Tensor:
        where: dict[str, Any] = {"attention_mask": self._mask, "position_ids": positions[None]}
        if scales_by_place(self.head.attention):
            where["past_key_values"] = TokenPlaces(positions)
        with self._attention.chosen():
            outputs = self.head.attend(mixed[None], spec_step=step, **where)
        step.check(self.head.attention, self.head.shape.num_layers)
        return outputs[0]

    def _run(self, tokens: Tensor, features: Tensor, segments: Sequence[Segment]) -> Tensor:
        """One packed pass over pairs that carry no state: (T,) and (T, H) -> (T, H)."""
        step, positions = self._begin(segments)
        (outputs,) = self._graphs.run(self._compute, [tokens, positions, features], step)
        return outputs[: len(tokens)]

    def _compute(self, tensors: list[Tensor], step: PackedStep) -> list[Tensor]:
        tokens, positions, features = tensors
        mixed, _ = self.head.mix(tokens[None], features[None])
        return [self._attend(mixed[0], positions, step)]

    def _stretch(
        self, spans: Sequence[Span], texts: Sequence[Sequence[int]]
    ) -> tuple[Tensor, State | None]:
        segments, start = [], 0
        for row, begin, end in spans:
            segments.append(self.pair_segment(row, begin, end, start))
            row.stored, start = end, segments[-1].end
        if self.head.shape.recurrent:
            mixed, state = self._mix(spans, texts)
            return self.attend(mixed, segments), state
        tokens = torch.tensor([t for span in spans for t in _tokens(texts, *span)])
        features = [row.slice(begin, end) for row, begin, end in spans]
        joined = features[0] if len(features) == 1 else torch.cat(features)
        return self._run(tokens, joined, segments), None

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
        places = torch.arange(end)
        mine, visible = places[begin:], None
        if end - begin > self._size:
            block_end = end - (end - 1 - mine) // self._size * self._size
            visible = places < block_end[:, None]
        return Segment(
            slot=row.slot,
            start=start,
            end=start + end - begin,
            num_keys=end,
            position=mine + row.first,
            last_position=end - 1 + row.first,
            key_position=places + row.first,
            visible=visible,
            prefix=begin,
        )

    def _block_segment(self, row: PairRow, blocks: Blocks, start: int) -> Segment:
        """Blocks see all true pairs, the blocks they descend from, and themselves."""
        pairs, length = row.num_pairs, blocks.count * self._size
        offsets = blocks.offsets + pairs
        key_position = torch.cat([torch.arange(pairs), offsets]) + row.first
        visible = None
        if blocks.visible is not None:
            visible = blocks.visible.new_ones(length, len(key_position))
            visible[:, pairs:] = blocks.visible
        return Segment(
            slot=row.slot,
            start=start,
            end=start + length,
            num_keys=len(key_position),
            position=key_position[-length:],
            last_position=row.first + pairs + blocks.depth + self._size - 1,
            key_position=key_position,
            visible=visible,
            prefix=pairs,
        )


def check_packed(model: PreTrainedModel) -> None:
    """Refuse a model whose layers cannot run the blocks of a Falcon head."""
    if not takes_packed(model):
        raise UnsupportedError(
            f"{type(model).__name__} takes no attention function, which the blocks of a Falcon "
            "head need; use spec_strategy='draft' or 'tree'"
        )


def joined(states: Sequence[State]) -> State:
    """LSTM states of several pairs as one, in their order."""
    hidden, cell = (torch.cat(kind, dim=1) for kind in zip(*states, strict=True))
    return hidden, cell


def _tokens(texts: Sequence[Sequence[int]], row: PairRow, begin: int, end: int) -> list[int]:
    """The tokens of pairs [begin, end)."""
    return list(texts[row.slot][row.first + begin + 1 : row.first + end + 1])
