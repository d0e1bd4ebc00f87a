"""Growth of drafts on the device, without synchronizing between passes.

If no length policy decides after each pass, all passes are queued, their tokens are fetched in one
transfer, and the drafts are rebuilt from them node by node. The host has to know the shape of what
it queues. So each pass runs the largest number of nodes per row that it can have; rows with fewer
are padded, and padding gets no children. The parents of the nodes follow from that shape, or the
device chooses the nodes and computes what each of them sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from hf_spec_kernels.ragged_tree_attention import pack_bits
from torch import Tensor

from hf_spec.backend.device.transfer import fetch_all, send
from hf_spec.drafting.rank_tree import Path
from hf_spec.drafting.tree_growth import Growth, NextLists, NextTokens, RowGrowth, TreeShape

# Most nodes of a row in a level that are chosen on the device. Wider levels are usually pruned, so
# padding all of them would cost more than synchronizing.
WIDEST = 32


@dataclass(frozen=True)
class PassPlan:
    """Shape of a pass, known in advance.

    Attributes:
        width: nodes of a row.
        picks: entries of the pass before, flattened over nodes, levels and ranks, that lead to each
            node: one per level of that pass. None where the most probable are chosen.
        index: `picks` on the device; None if those are all entries.
        own_bits: (width, bytes) uint8 on the device, as `RaggedLayout.bits`: each node itself.
    """

    width: int
    picks: list[int] | None
    index: Tensor | None = None
    own_bits: Tensor | None = None


class PassPlans:
    """The plans of drafts of one shape, for the `device` that chooses the nodes."""

    def __init__(self, shape: TreeShape, ends: Sequence[int], device: torch.device):
        self.shape = shape
        self.device = device
        self.ends = send([torch.tensor(ends)], device)[0] if ends else None
        self._plans: dict[tuple[int, int], list[PassPlan]] = {}

    def fit(self, depth: int) -> bool:
        """Return True if drafts of that depth can be planned, at little padding."""
        shape = self.shape
        if shape.merge_length is not None:
            return False
        if shape.whole:
            return True
        widths = [width for width, _ in _pass_picks(shape, shape.num_ranks, depth)]
        # Trees of ranks ignore `max_draft_nodes`.
        bounded = shape.tree is None and sum(widths) * shape.num_ranks >= shape.max_draft_nodes
        return max(widths) <= WIDEST and not bounded

    def of(self, num_ranks: int, depth: int) -> list[PassPlan]:
        """Return the plan of each pass if `num_ranks` tokens may follow each node.

        There are fewer passes than `depth` needs if no node has children below them.
        """
        key = num_ranks, depth
        if key not in self._plans:
            self._plans[key] = self._make(num_ranks, depth)
        return self._plans[key]

    def _make(self, num_ranks: int, depth: int) -> list[PassPlan]:
        passes = list(_pass_picks(self.shape, num_ranks, depth))
        widths = [width for width, _ in passes]
        # Every node sees the root, which has no bit.
        own_bits = pack_bits(torch.eye(sum(widths[1:]), dtype=torch.bool)).split(widths[1:])
        index = [torch.tensor(picks or []) for _, picks in passes]
        sent = send([*index, own_bits[0][:0], *own_bits] if own_bits else index, self.device)
        chooses = any(picks is None for _, picks in passes)
        entries = num_ranks * self.shape.levels_per_pass
        plans = []
        for number, (width, picks) in enumerate(passes):
            all_entries = number == 0 or picks == list(range(widths[number - 1] * entries))
            placed = None if picks is None or all_entries else sent[number]
            seen = sent[len(passes) + number] if chooses and number else None
            plans.append(PassPlan(width, picks, placed, seen))
        return plans


def _pass_picks(
    shape: TreeShape, num_ranks: int, depth: int
) -> Iterator[tuple[int, list[int] | None]]:
    """Yield the width and the picks of every pass, see `PassPlan`."""
    yield 1, [0]
    if shape.tree is None:
        width = 1
        for _ in range(1, depth):
            children = width * num_ranks
            width = min(children, shape.expanded_per_level)
            yield width, list(range(children)) if width == children else None
        return
    levels = shape.levels_per_pass
    place_of: dict[Path, int] = {(): 0}
    for level in range(levels, depth, levels):
        nodes = [
            path
            for path in shape.tree.paths
            if len(path) == level
            and path in shape.tree.inner
            and path[:-levels] in place_of
            and max(path[-levels:]) < num_ranks
        ]
        if not nodes:
            return
        yield (
            len(nodes),
            [
                (place_of[path[:-levels]] * levels + step) * num_ranks + rank
                for path in nodes
                for step, rank in enumerate(path[-levels:])
            ],
        )
        place_of = {path: place for place, path in enumerate(nodes)}


@dataclass(frozen=True)
class QueuedPass:
    """A pass over w nodes of each of A rows, on the device.

    Attributes:
        chosen: (A, w) int64, the entries of the pass before that were chosen to run; None where
            the plan has `picks`.
        tokens, chances: (A, w, levels, ranks), see `NextTokens`.
        probs: (A * w, R) what the tokens were drawn from; None if they were not drawn.
    """

    rows: list[int]
    plan: PassPlan
    chosen: Tensor | None
    tokens: Tensor
    chances: Tensor
    probs: Tensor | None


class DeviceGrowth(Growth):
    """Growth that is fetched once, when all passes are queued.

    Attributes:
        pass_parents: of the nodes that have run and run next, the same in each row, the root
            first: where in this list the parent is, -1 for the root. If the device chooses the
            nodes, only the depths that follow from it are right.
    """

    def __init__(self, drafts: Mapping[int, RowGrowth], plans: PassPlans):
        super().__init__(drafts)
        self.pass_parents = [-1]
        self._plans = plans
        self._plan = [PassPlan(1, [0])]
        self._queued: list[QueuedPass] = []
        # (A, width, ...) of the nodes: their tokens; the entries of the pass before that they are,
        # if the device chose them; the probability of reaching them, float64, 0 for padding; and
        # the bits of `visible`.
        self._tokens: Tensor | None = None
        self._chosen: Tensor | None = None
        self._reach: Tensor | None = None
        self._bits: Tensor | None = None
        # How the nodes follow from the pass before: the places of the rows in it, None for the
        # same; the entries that run now, None for all; its number of nodes, and of entries each.
        self._row_places: Tensor | None = None
        self._index: Tensor | None = None
        self._before = 1, 1

    @property
    def tokens_on_device(self) -> bool:  # type: ignore[override]
        """True but for the roots."""
        return self._tokens is not None

    @property
    def tokens(self) -> Tensor:
        """See `Growth`."""
        if self._tokens is None:
            return torch.tensor([self._drafts[row].graph.tokens[0] for row in self.rows])
        return self._tokens.flatten()

    @property
    def visible(self) -> Tensor | None:  # type: ignore[override]
        """See `Growth`."""
        return None if self._bits is None else self._bits.flatten(0, 1)

    @property
    def parents(self) -> Tensor:
        """See `Growth`."""
        if self._tokens is None:
            return torch.arange(len(self.rows))
        (before, entries), levels = self._before, self._plans.shape.levels_per_pass
        rows, index, device = self._row_places, self._index, self._plans.device
        if rows is None:
            rows = torch.arange(len(self.rows), device=device)
        if index is None:
            index = torch.arange(self._width * levels, device=device)
        return (rows[:, None] * before + index[..., ::levels] // entries).flatten()

    def num_nodes(self, row: int) -> int:
        """See `Growth`."""
        return self._width

    def paths(self) -> list[list[int]]:
        """Raise `NotImplementedError`: the host does not know the tokens."""
        raise NotImplementedError("paths of drafts whose tokens are on the device")

    def node_depths(self) -> list[int]:
        """See `Growth`."""
        return [self.depth] * len(self.owners)

    def expanded_subtree(self, row: int) -> tuple[list[int], list[int]]:
        """See `Growth`."""
        return [self._drafts[row].graph.tokens[0]] * len(self.pass_parents), self.pass_parents

    def add(self, following: NextTokens) -> None:
        """See `Growth`."""
        _, levels, num_ranks = following.tokens.shape
        shape = len(self.rows), self._width, levels, num_ranks
        if not self._queued:
            deepest = max(draft.max_levels for draft in self._drafts.values())
            self._plan = self._plans.of(num_ranks, deepest)
        pair = following.tokens.view(shape), following.chances.view(shape)
        plan = self._plan[len(self._queued)]
        self._queued.append(QueuedPass(self.rows, plan, self._chosen, *pair, following.probs))
        self.depth += levels

    def next_rows(self) -> list[int]:
        """See `Growth`."""
        if len(self._queued) == len(self._plan):
            return []
        return [row for row in self.rows if self._drafts[row].max_levels > self.depth]

    def advance(self, rows: Sequence[int]) -> None:
        """See `Growth`; the device chooses the nodes."""
        before, self.rows = self.rows, list(rows)
        if not rows:
            return
        tokens, chances = self._queued[-1].tokens, self._queued[-1].chances
        self._row_places = None
        if len(rows) < len(before):
            places = [place for place, row in enumerate(before) if row in rows]
            (index,) = send([torch.tensor(places)], tokens.device)
            tokens, chances, self._row_places = tokens[index], chances[index], index
            self._reach = None if self._reach is None else self._reach[index]
            self._bits = None if self._bits is None else self._bits[index]
        self._choose(self._plan[len(self._queued)], tokens, chances)

    def finish(self) -> None:
        """See `Growth`; fetches all passes in one transfer."""
        tensors: list[Tensor] = []
        for queued in self._queued:
            chosen = [] if queued.chosen is None else [queued.chosen]
            tensors += [queued.tokens, queued.chances, *chosen]
        lists = iter(fetch_all(tensors))
        for number, queued in enumerate(self._queued):
            tokens, chances = next(lists), next(lists)
            picked: list[list[int]] = [] if queued.chosen is None else next(lists)
            for place, row in enumerate(queued.rows):
                draft, drawn_from = self._drafts[row], None
                if queued.probs is not None:
                    drawn_from = queued.probs.view(len(queued.rows), queued.plan.width, -1)[place]
                picks = picked[place] if picked else queued.plan.picks or []
                if number:
                    # A whole tree expands all of its frontier.
                    ran = None if draft.shape.whole else [draft.last_level[pick] for pick in picks]
                    nodes = draft.begin_pass(ran)
                else:
                    # The pass over the root began with the growth.
                    nodes = self._nodes[row]
                draft.add_levels(nodes, NextLists(tokens[place], chances[place], drawn_from))
        self._queued = []

    @property
    def _width(self) -> int:
        return self._plan[len(self._queued)].width

    def _choose(self, plan: PassPlan, tokens: Tensor, chances: Tensor) -> None:
        """Choose the nodes to run among (A, before, levels, ranks) entries."""
        num_rows, before, levels, num_ranks = tokens.shape
        entries = levels * num_ranks
        first = len(self.pass_parents) - before
        picks = [0] * plan.width if plan.picks is None else plan.picks[::levels]
        self.pass_parents = [*self.pass_parents, *(first + pick // entries for pick in picks)]
        index = None if plan.index is None else plan.index.expand(num_rows, -1)
        self._chosen = None
        if plan.own_bits is not None:
            reach = self._reached(tokens.flatten(1, 2), chances.flatten(1, 2))
            if plan.picks is None:
                # Ties go to the first, as on the host, and the nodes run in the same order.
                best = reach.sort(dim=1, descending=True, stable=True).indices[:, : plan.width]
                index = self._chosen = best.sort(dim=1).values
            self._reach = _picked(reach, index)
            own_bits = plan.own_bits.expand(num_rows, -1, -1)
            self._bits = _with_parents_bits(self._bits, index, own_bits, num_ranks)
        self._tokens = _picked(tokens.flatten(1), index)
        self._index, self._before = index, (before, entries)

    def _reached(self, tokens: Tensor, chances: Tensor) -> Tensor:
        """Return (A, before * ranks) float64, the probability of reaching each child."""
        shape, ends = self._plans.shape, self._plans.ends
        # In the precision of the host, which prunes by the same rules.
        likely = chances.double()
        reach = likely if self._reach is None else likely * self._reach[..., None]
        rules = []
        if shape.min_probability > 0:
            rules.append(likely >= shape.min_probability)
        if shape.min_sibling_ratio > 0:
            rules.append(likely >= shape.min_sibling_ratio * likely[..., :1])
        if ends is not None:
            rules.append((tokens[..., None] != ends).all(dim=-1))
        for rule in rules:
            reach = reach.where(rule, 0.0)
        return reach.flatten(1)


def _picked(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.gather(1, index)


def _with_parents_bits(
    bits: Tensor | None, index: Tensor | None, own_bits: Tensor, num_ranks: int
) -> Tensor:
    if bits is None:
        return own_bits
    if index is None:
        return bits.repeat_interleave(num_ranks, dim=1) | own_bits
    above = (index // num_ranks)[..., None].expand(-1, -1, bits.shape[-1])
    return bits.gather(1, above) | own_bits
