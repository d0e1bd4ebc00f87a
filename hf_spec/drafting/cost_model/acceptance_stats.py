"""Where drafts come from, what each one is worth, and how several become one tree.

A *source* is a drafter with a memory of how it fared, per row. Of every node it proposes it says
how likely the target is to go there: the product along the path of the shares of nodes of the same
kind that were accepted after an accepted parent. Kinds are the drafter's own probability in tenths
or, where it has none, depth and rank. DecayedRates decay, and begin with what earlier generations
of the model came to (`AcceptanceStats`), the first one with an expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.engine.decode.drafter import Drafter
from hf_spec.engine.decode.generation_state import GenerationState
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput

# How fast old trials are forgotten, per trial; and how many the expectation counts for.
DECAY = 0.95
EXPECTATION_WEIGHT = 10.0
# Of whole levels, by which it is decided to ask a source: it should learn fast that one is no good.
LEVEL_WEIGHT = 3.0
LEVEL_EXPECTATION = 0.6
# A source that is not asked is slowly forgotten, until it is tried again; per round.
FADE = 0.99
# The same of what earlier generations came to: trials count for longer, and a source that is never
# asked is tried again after hundreds of rounds.
MEMORY_DECAY, MEMORY_FADE = 0.99, 0.998

# Nodes less likely than this are not looked at.
MIN_VALUE = 0.01

PROBABILITY_KINDS = 10
# Nodes that a level of a draft is expected to send.
NODES_PER_LEVEL = 4
# Depths and ranks that are told apart.
DEPTH_KINDS, RANK_KINDS = 3, 2


class DecayedRates:
    """How often things of each kind came true, old trials counting less.

    The `expected` share of a kind counts for `weight` trials, one trial for `decay` of the next.
    """

    def __init__(self, expected: Callable[..., float], weight: float, decay: float = DECAY):
        self._expected = expected
        self._weight = weight
        self._decay = decay
        self._trials: dict[Hashable, tuple[float, float]] = {}

    def share(self, kind: Hashable) -> float:
        """Between 0 and 1."""
        hits, trials = self._trials.get(kind, (0.0, 0.0))
        return (self._weight * self._expected(kind) + hits) / (self._weight + trials)

    def count(self, kind: Hashable, hit: bool) -> None:
        """Count a trial."""
        hits, trials = self._trials.get(kind, (0.0, 0.0))
        # A new dictionary: copies keep theirs.
        counted = self._decay * hits + hit, self._decay * trials + 1
        self._trials = {**self._trials, kind: counted}

    def now(self) -> DecayedRates:
        """The same, which nothing is added to any more."""
        return copy(self)

    def fade(self, kept: float = FADE) -> None:
        """Forget everything but a share of it."""
        self._trials = {kind: (kept * h, kept * t) for kind, (h, t) in self._trials.items()}


def shares_of_levels(decay: float = DECAY) -> DecayedRates:
    """How often the target went on by a level, which is to be learned fast."""
    return DecayedRates(lambda _: LEVEL_EXPECTATION, LEVEL_WEIGHT, decay)


@dataclass(eq=False)
class AcceptanceStats:
    """How the drafts of one source fared: their nodes by kind, and whole levels by depth."""

    nodes: DecayedRates
    levels: DecayedRates

    @classmethod
    def expected(cls, shares: tuple[float, float], decay: float = DECAY) -> AcceptanceStats:
        """Nothing is known; `shares` as in `DraftSource.expected`."""
        nodes = DecayedRates(partial(_expected_share, shares), EXPECTATION_WEIGHT, decay)
        return cls(nodes, shares_of_levels(decay))

    @classmethod
    def after(cls, earlier: AcceptanceStats) -> AcceptanceStats:
        """What is known now is all that is expected; what is learned of either is not shared."""
        nodes = DecayedRates(earlier.nodes.now().share, EXPECTATION_WEIGHT)
        return cls(nodes, DecayedRates(earlier.levels.now().share, LEVEL_WEIGHT))


@dataclass(eq=False)
class DraftSource:
    """A drafter, what it proposed last, and how its proposals fare.

    Args:
        name: in counters and timings.
        drafter: asked for drafts.
        depth: most levels that it is asked for.
        expected: share of the first node at depth 1 and of those below that is accepted, before
            any was seen and where the drafter has no probabilities of its own.
        nodes_per_level: of its tree that are expected to be sent.
        fade: share of what is known that stays in a round in which it is not asked.

    Attributes:
        tree, limits: proposed last, and per row how deep it was asked to go.
        reached: per row how many of its levels the target went through, sent or not.
    """

    name: str
    drafter: Drafter
    depth: int
    expected: tuple[float, float] = (0.5, 0.7)
    nodes_per_level: int = NODES_PER_LEVEL
    fade: float = FADE

    def __post_init__(self) -> None:
        self.depth = min(self.depth, self.drafter.max_depth)
        self.tree: DraftTree
        self.limits: Mapping[int, int] = {}
        self.reached: dict[int, int] = {}
        self.start(0)

    def start(self, num_rows: int, memory: AcceptanceStats | None = None) -> None:
        """Begin with what is remembered; the drafter forgets when it is made active."""
        self._memory = memory
        self._fared = [self._new() for _ in range(num_rows)]
        self._sizes: dict[int, int] = {}

    def restart(self, row: int) -> None:
        """Forget the sequence before, and let the drafter do so."""
        self._fared[row] = self._new()
        self._sizes.pop(row, None)
        self.drafter.restart(row)

    def ask(self, state: GenerationState, limits: Mapping[int, int]) -> None:
        """Let the drafter propose; rows with limit 0 take part, so that it keeps count of them."""
        self.limits = {row: min(limit, self.depth) for row, limit in limits.items()}
        self.tree = self.drafter.draft(state, self.limits)
        for row, limit in self.limits.items():
            if limit:
                self._sizes[row] = len(self.tree.nodes(row)) - 1

    def useful_depth(self, row: int) -> int:
        """How deep a draft without probabilities goes until even its best node is too unlikely."""
        value, depth = 1.0, 0
        while depth < self.depth:
            value *= self._fared[row].nodes.share((min(depth + 1, DEPTH_KINDS), 0))
            if value < MIN_VALUE:
                break
            depth += 1
        return depth

    def size(self, row: int, otherwise: int) -> int:
        """Nodes of its last tree for `row`."""
        return self._sizes.get(row, otherwise)

    def level(self, row: int, depth: int) -> float:
        """Probability that the target goes on to `depth` in its tree, from the depth above."""
        return self._fared[row].levels.share(depth)

    def values(self, row: int) -> list[float]:
        """Per node of its tree for `row` the probability that the target goes there.

        Nothing below a node that is too unlikely to be looked at has any.
        """
        tree, shares = self.tree, self._fared[row].nodes
        start = tree.row_start[row]
        values = [1.0]
        for node in tree.nodes(row)[1:]:
            above = values[tree.parent[node] - start]
            values.append(above * shares.share(self._kind(node)) if above >= MIN_VALUE else 0.0)
        return values

    def join(self, trees: Mapping[int, MergedTree]) -> None:
        """Add what it proposed to the tree of every row."""
        for row, tree in trees.items():
            tree.take(self, row)

    def observe(self, verdict: Verdict, output: ForwardOutput) -> None:
        """Learn how its own tree fared, and let the drafter know.

        A drafter that reads hidden states needs all nodes that were run; the others know their own.
        """
        accepted: list[list[int]] = [[] for _ in verdict.accepted]
        self.reached = {}
        for row, limit in self.limits.items():
            path = self._follow(row, verdict.tokens(row), limit)
            self.reached[row] = len(path)
            accepted[row] = path[: len(verdict.accepted[row])]
        own = Verdict(self.tree, accepted, verdict.bonus)
        self.drafter.observe(verdict if self.drafter.hidden_layers else own, output)

    def _follow(self, row: int, tokens: Sequence[int], limit: int) -> list[int]:
        """Count what was right; the nodes of its tree that carry the tokens, as far as they do."""
        tree, path = self.tree, [self.tree.row_start[row]]
        if not limit:
            self._fared[row].levels.fade(self.fade)
            if self._memory is not None:
                self._memory.levels.fade(MEMORY_FADE)
            return []
        learning = [self._fared[row], *([self._memory] if self._memory is not None else [])]
        for depth, token in enumerate(tokens, start=1):
            if depth > limit:
                break
            for node in tree.proposals(path[-1]):
                for known in learning:
                    known.nodes.count(self._kind(node), tree.tokens[node] == token)
            child = tree.child(path[-1], token)
            for known in learning:
                known.levels.count(depth, child is not None)
            if child is None:
                break
            path.append(child)
        return path[1:]

    def _kind(self, node: int) -> Hashable:
        tree = self.tree
        if tree.node_probs is not None:
            return min(int(tree.node_probs[node] * PROBABILITY_KINDS), PROBABILITY_KINDS - 1)
        rank = tree.children[tree.parent[node]].index(node)
        return min(tree.depth[node], DEPTH_KINDS), min(rank, RANK_KINDS - 1)

    def _new(self) -> AcceptanceStats:
        if self._memory is None:
            return AcceptanceStats.expected(self.expected)
        return AcceptanceStats.after(self._memory)


def _expected_share(expected: tuple[float, float], kind: int | tuple[int, int]) -> float:
    """What nodes of a kind are expected to be worth before any was seen."""
    if isinstance(kind, int):
        return (kind + 0.5) / PROBABILITY_KINDS
    depth, rank = kind
    return expected[depth > 1] / (1 if rank == 0 else 4)


class MergedTree(TokenGraph):
    """The trees of several sources for one row as one; every node has its best value."""

    def __init__(self, root: int):
        super().__init__([root])
        self.values = [1.0]
        self._children: dict[tuple[int, int], int] = {}

    def take(self, source: DraftSource, row: int) -> None:
        """Take in the tree that a source proposes for `row`."""
        tree = source.tree
        start = tree.row_start[row]
        place = {start: 0}
        for node, value in zip(tree.nodes(row)[1:], source.values(row)[1:], strict=True):
            if value < MIN_VALUE:
                continue
            parent, token = place[tree.parent[node]], tree.tokens[node]
            here = self._children.setdefault((parent, token), len(self.tokens))
            if here == len(self.tokens):
                self.add_node(parent, token)
                self.values.append(0.0)
            # No node is worth more than its parent, by any source that has both.
            self.values[here] = max(self.values[here], value)
            place[node] = here

    def reach_by_depth(self) -> list[float]:
        """Per depth from 1 the probability that the target goes to any of its nodes."""
        reach_by_depth = [0.0] * max(self.depth)
        for depth, value in zip(self.depth[1:], self.values[1:], strict=True):
            reach_by_depth[depth - 1] = min(1.0, reach_by_depth[depth - 1] + value)
        return reach_by_depth

    def keep(self, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
        """Tokens and parents of the root and `nodes`, which hold the parent of each of them."""
        kept = [0, *sorted(nodes)]
        place = {node: index for index, node in enumerate(kept)}
        parents = [place.get(self.parents[node], -1) for node in kept]
        return [self.tokens[node] for node in kept], parents
