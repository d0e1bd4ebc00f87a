"""Growth of a draft that the host does not watch: the device chooses what is drafted on.

Where nobody asks after a level whether to go on, the host need not know its tokens before the last
level is there. All levels are queued, and what they found comes back in one transfer, of which
`hang` makes what would have grown level by level, node by node.

The host has to know the shape of what it queues. So each level runs as many nodes of every row as
it has at most: where fewer may be drafted on, others take their place, and nothing is hung below
them. A chain is the tree with one node a level. What a node descends from follows from that shape
or is known to the device alone, which then says itself what each node sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from hf_spec_kernels.ragged_tree_attention import pack_bits
from torch import Tensor

from hf_spec.backend.device.transfer import fetch_all, send
from hf_spec.drafting.rank_tree import Path
from hf_spec.drafting.tree_growth import Growth, TreeShape

# Most nodes of a row in a level. Wider ones are meant to be pruned, and padding all of them would
# cost more than the host's looking at them.
WIDEST = 32


@dataclass(frozen=True)
class LevelPlan:
    """What is known of a level beforehand.

    Attributes:
        width: how many nodes of a row run.
        picks: which children of the level before these are, counted over all of its nodes; None
            where the likeliest are chosen.
        index: `picks` on the device; None where those are all of them.
        own: (width, bytes) uint8 on the device, as `RaggedLayout.bits`: each node itself.
    """

    width: int
    picks: list[int] | None
    index: Tensor | None = None
    own: Tensor | None = None


class Plans:
    """The plans of drafts of one shape; `ends` are the tokens that nothing follows."""

    def __init__(self, shape: TreeShape, ends: Sequence[int], device: torch.device):
        self.shape = shape
        self.device = device
        self.ends = send([torch.tensor(ends)], device)[0] if ends else None
        self._made: dict[tuple[int, int], list[LevelPlan]] = {}

    def fit(self, depth: int) -> bool:
        """Whether drafts of so many levels have a shape that is known, and worth filling up."""
        shape = self.shape
        widths = [width for width, _ in _levels(shape, shape.num_ranks, depth)]
        # Of trees of ranks that bound is not asked.
        bounded = shape.tree is None and sum(widths) * shape.num_ranks >= shape.max_draft_nodes
        return shape.merge_length is None and max(widths) <= WIDEST and not bounded

    def of(self, num_ranks: int, depth: int) -> list[LevelPlan]:
        """One per level, where that many tokens may follow each; fewer than `depth` if all end."""
        key = num_ranks, depth
        if key not in self._made:
            self._made[key] = self._make(num_ranks, depth)
        return self._made[key]

    def _make(self, num_ranks: int, depth: int) -> list[LevelPlan]:
        levels = list(_levels(self.shape, num_ranks, depth))
        widths = [width for width, _ in levels]
        # Everybody sees the root without a bit.
        own = pack_bits(torch.eye(sum(widths[1:]), dtype=torch.bool)).split(widths[1:])
        index = [torch.tensor(picks or []) for _, picks in levels]
        sent = send([*index, own[0][:0], *own] if own else index, self.device)
        chooses = any(picks is None for _, picks in levels)
        plans = []
        for level, (width, picks) in enumerate(levels):
            whole = level == 0 or picks == list(range(widths[level - 1] * num_ranks))
            placed = None if picks is None or whole else sent[level]
            seen = sent[len(levels) + level] if chooses and level else None
            plans.append(LevelPlan(width, picks, placed, seen))
        return plans


def _levels(shape: TreeShape, num_ranks: int, depth: int) -> Iterator[tuple[int, list[int] | None]]:
    """Per level how many nodes run, and which children of the level before, None if chosen."""
    yield 1, [0]
    width = 1
    places: dict[Path, int] = {(): 0}
    for level in range(1, depth):
        if shape.tree is not None:
            mine = [
                path
                for path in shape.tree.paths
                if path in shape.tree.inner and path[:-1] in places and path[-1] < num_ranks
            ]
            mine = [path for path in mine if len(path) == level]
            if not mine:
                return
            yield len(mine), [places[path[:-1]] * num_ranks + path[-1] for path in mine]
            places = {path: place for place, path in enumerate(mine)}
            continue
        children = width * num_ranks
        width = min(children, shape.expanded_per_level)
        yield width, list(range(children)) if width == children else None


@dataclass(frozen=True)
class Level:
    """What was found after the nodes of a level that ran, A rows of w nodes each.

    Attributes:
        rows: the rows.
        plan: the level's.
        chosen: (A, w) int64, which children of the level before ran; None where the plan says so.
        tokens, chances: (A, w, ranks), what may follow each, and how likely it is.
        probs: (A * w, R) what these were drawn from; None where they were not drawn.
    """

    rows: list[int]
    plan: LevelPlan
    chosen: Tensor | None
    tokens: Tensor
    chances: Tensor
    probs: Tensor | None = None


class DeviceGrowth:
    """Drafts of some rows under construction, on the device.

    Attributes:
        rows: those that grow.
        parents: of what ran and runs of each row, the root first, the place of the parent, -1 for
            the root. Where the device alone knows it, one of the same depth.
    """

    def __init__(self, plans: Plans, limits: Mapping[int, int]):
        self.rows = list(limits)
        self.parents = [-1]
        self._limits = limits
        self._plans = plans
        self._plan = [LevelPlan(1, [0])]
        self._levels: list[Level] = []
        # Of what runs next, (A, width, ...): its tokens; which children of the level before it is,
        # where it was chosen; how likely it is to come there, float64, 0 if nothing follows; and
        # what it sees.
        self._tokens: Tensor | None = None
        self._chosen: Tensor | None = None
        self._reach: Tensor | None = None
        self._sees: Tensor | None = None
        # Of the level before: where the rows were, None for the same places; the children that
        # run now, None for all; and how many nodes it had, and children each.
        self._places: Tensor | None = None
        self._picks: Tensor | None = None
        self._before = 1, 1

    @property
    def width(self) -> int:
        """How many nodes of each row run next."""
        return self._plan[len(self._levels)].width

    @property
    def depth(self) -> int:
        """How deep they lie, 0 for the roots."""
        return len(self._levels)

    @property
    def owners(self) -> list[int]:
        """The row of each node that runs next."""
        return [row for row in self.rows for _ in range(self.width)]

    @property
    def tokens(self) -> Tensor | None:
        """(A * width,) int64, what runs next; None for the roots, which the host knows."""
        return None if self._tokens is None else self._tokens.flatten()

    @property
    def sees(self) -> Tensor | None:
        """(A * width, bytes) uint8, as `RaggedLayout.bits`, what these descend from.

        That is without the root; None where `parents` say so.
        """
        return None if self._sees is None else self._sees.flatten(0, 1)

    @property
    def above(self) -> Tensor:
        """(A * width,) int64, where their parents are among the nodes of the level before.

        Of roots, their places.
        """
        before, num_ranks = self._before
        rows = self._places
        if rows is None:
            rows = torch.arange(len(self.rows), device=self._plans.device)
        slots = self._picks
        if slots is None:
            slots = torch.arange(self.width, device=self._plans.device)
        return (rows[:, None] * before + slots // num_ranks).flatten()

    def add(self, tokens: Tensor, chances: Tensor, probs: Tensor | None = None) -> None:
        """Take (A * width, ranks) tokens that may follow what ran, and their probabilities.

        `probs` are the (A * width, R) that they were drawn from, if they were.
        """
        shape = len(self.rows), self.width, tokens.shape[-1]
        if not self._levels:
            self._plan = self._plans.of(tokens.shape[-1], max(self._limits.values()))
        plan = self._plan[len(self._levels)]
        pair = tokens.view(shape), chances.view(shape)
        self._levels.append(Level(self.rows, plan, self._chosen, *pair, probs))

    def descend(self) -> bool:
        """Choose what runs next, of the rows that go on; whether there is anything."""
        level = len(self._levels)
        kept = [place for place, row in enumerate(self.rows) if self._limits[row] > level]
        if level == len(self._plan) or not kept:
            return False
        tokens, chances = self._levels[-1].tokens, self._levels[-1].chances
        self._places = None
        if len(kept) < len(self.rows):
            self.rows = [self.rows[place] for place in kept]
            (index,) = send([torch.tensor(kept)], tokens.device)
            tokens, chances, self._places = tokens[index], chances[index], index
            self._reach = None if self._reach is None else self._reach[index]
            self._sees = None if self._sees is None else self._sees[index]
        self._choose(self._plan[level], tokens, chances)
        return True

    def fetch(self) -> list[Found]:
        """Every level on the host, in one transfer."""
        tensors: list[Tensor] = []
        for level in self._levels:
            chosen = [] if level.chosen is None else [level.chosen]
            tensors += [level.tokens, level.chances, *chosen]
        lists = iter(fetch_all(tensors))
        found = []
        for level in self._levels:
            tokens, chances = next(lists), next(lists)
            known = [level.plan.picks or []] * len(level.rows)
            picks = known if level.chosen is None else next(lists)
            found.append(Found(level, tokens, chances, picks))
        return found

    def _choose(self, plan: LevelPlan, tokens: Tensor, chances: Tensor) -> None:
        """Of (A, before, ranks) children those that run next."""
        num_rows, before, num_ranks = tokens.shape
        first = len(self.parents) - before
        picks = [0] * plan.width if plan.picks is None else plan.picks
        self.parents += [first + pick // num_ranks for pick in picks]
        index = None if plan.index is None else plan.index.expand(num_rows, -1)
        self._chosen = None
        if plan.own is not None:
            reach = self._reached(tokens, chances)
            if plan.picks is None:
                # Ties go to the first, as on the host, and so does the order of what runs.
                best = reach.sort(dim=1, descending=True, stable=True).indices[:, : plan.width]
                index = self._chosen = best.sort(dim=1).values
            self._reach = _picked(reach, index)
            self._sees = _above(self._sees, index, plan.own.expand(num_rows, -1, -1), num_ranks)
        self._tokens = _picked(tokens.flatten(1), index)
        self._picks, self._before = index, (before, num_ranks)

    def _reached(self, tokens: Tensor, chances: Tensor) -> Tensor:
        """(A, before * ranks) float64: how likely it is to come to each child."""
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


@dataclass(frozen=True)
class Found:
    """A level on the host: by row and node the tokens and chances of its children.

    `picks` are by row which children of the level before are its nodes.
    """

    level: Level
    tokens: list[list[list[int]]]
    chances: list[list[list[float]]]
    picks: list[list[int]]

    def hang(self, growths: Mapping[int, Growth], ends: Callable[[int], bool]) -> None:
        """Add the children of every node that would have run, and see what grows on."""
        width, probs = self.level.plan.width, self.level.probs
        for place, row in enumerate(self.level.rows):
            growth = growths[row]
            above = growth.newest
            nodes = growth.begin_level([above[pick] for pick in self.picks[place]])
            for slot, node in enumerate(nodes):
                drawn_from = None if probs is None else probs[place * width + slot]
                tokens, chances = self.tokens[place][slot], self.chances[place][slot]
                growth.expand(node, tokens, chances, drawn_from)
            growth.narrow(ends)


def _picked(values: Tensor, index: Tensor | None) -> Tensor:
    return values if index is None else values.gather(1, index)


def _above(sees: Tensor | None, index: Tensor | None, own: Tensor, num_ranks: int) -> Tensor:
    """(A, width, bytes) what nodes see: what their parents do, and themselves."""
    if sees is None:
        return own
    if index is None:
        return sees.repeat_interleave(num_ranks, dim=1) | own
    above = (index // num_ranks)[..., None].expand(-1, -1, sees.shape[-1])
    return sees.gather(1, above) | own
