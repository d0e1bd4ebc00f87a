"""A draft under construction: what hangs where, and which nodes are drafted on.

A tree of ranks says which nodes there are; otherwise the likeliest paths grow.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.drafting.token_graph import TokenGraph


@dataclass(frozen=True)
class TreeShape:
    """What bounds the growth of a draft, by the names of the options; a chain by default.

    A tree of ranks says which nodes there are; without one the likeliest paths grow.
    """

    tree: RankTree | None = None
    children: int = 1
    expanded_per_level: int = 1
    max_nodes: int = sys.maxsize
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0
    merge_length: int | None = None
    max_draft_nodes: int = sys.maxsize

    @property
    def num_ranks(self) -> int:
        """Most tokens that may follow one."""
        return self.children if self.tree is None else self.tree.num_ranks


@dataclass
class Growth:
    """A draft under construction: the graph and the nodes to expand next, in order.

    Attributes:
        drawn: whether its tokens are drawn at random.
        ran: the nodes that have been expanded, in that order, the root first; -1 for what ran in
            place of a node.
        newest: the children of the newest level that was expanded, None for one that there is not.
        distributions: of nodes with children, what those were drawn from, where they were.
        scores: of nodes that have been expanded, what the length policy made of what follows.
        paths: of the nodes of a tree of ranks, the ranks that lead to them.
        merged: of nodes likelier by a merge edge than by their own, its parent and probability.
    """

    graph: TokenGraph
    shape: TreeShape
    drawn: bool = False
    # A set that keeps its order: wide drafts have thousands of nodes, each looked for here.
    frontier: dict[int, None] = field(default_factory=lambda: {0: None})
    ran: list[int] = field(default_factory=list)
    newest: list[int | None] = field(default_factory=lambda: [0])
    distributions: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=lambda: {0: ()})
    merged: dict[int, tuple[int, float]] = field(default_factory=dict)

    def begin_level(self, nodes: Sequence[int | None] | None = None) -> list[int]:
        """The nodes that are expanded next: those of the frontier, which begins again.

        With `nodes` these have run: what is not in the frontier is -1.
        """
        frontier = self.frontier
        taken = frontier if nodes is None else nodes
        mine = [node if node is not None and node in frontier else -1 for node in taken]
        self.frontier, self.newest = {}, []
        self.ran += mine
        # Before any of them has children, which may be merged into one of the others.
        self.scores |= dict.fromkeys(mine, 0.0)
        return mine

    def expand(
        self,
        node: int,
        tokens: Sequence[int],
        chances: Sequence[float],
        drawn_from: Tensor | None = None,
        score: float = 0.0,
    ) -> None:
        """Add what may follow a node of the level; nothing follows -1."""
        if node < 0:
            self.newest += [None] * len(tokens)
            return
        self.scores[node] = score
        if drawn_from is not None:
            self.distributions[node] = drawn_from
        self.newest += self._hang(node, tokens, chances)

    def narrow(self, ends: Callable[[int], bool]) -> None:
        """Leave the likeliest of the frontier in it; nothing follows a token that `ends`."""
        graph, reach = self.graph, self.graph.reach
        if len(graph) > self.shape.max_draft_nodes:
            self.frontier = {}
        alive = [node for node in self.frontier if not ends(graph.tokens[node])]
        most = len(alive) if self.shape.tree else self.shape.expanded_per_level
        best = heapq.nsmallest(most, alive, key=lambda node: -reach[node])
        self.frontier = dict.fromkeys(sorted(best))

    def _hang(self, node: int, tokens: Sequence[int], chances: Sequence[float]) -> list[int | None]:
        """Per token the new node, or None. Some of these grow on."""
        if self.shape.tree is not None:
            return self._hang_ranks(self.shape.tree, node, tokens, chances)
        # Whether a drawn child is sent must not depend on what was drawn, or the draft would no
        # longer follow `draft_probs`: sampled trees stop growing by count alone.
        if self.drawn and len(self.graph) + len(tokens) > self.shape.max_nodes + 1:
            return [None] * len(tokens)
        return [
            self._add(node, token, chance, chances[0])
            for token, chance in zip(tokens, chances, strict=True)
        ]

    def _add(self, node: int, token: int, chance: float, best: float) -> int | None:
        """One child, unless it is too unlikely beside its `best` sibling."""
        pruned = chance < self.shape.min_sibling_ratio * best and not self.drawn
        if chance <= 0 or pruned or len(self.graph) > self.shape.max_draft_nodes:
            return None
        child = self.graph.add(node, token, chance)
        if chance >= self.shape.min_probability:
            self._open(node, self.graph.edges[node][-1][0], chance)
        return child

    def _open(self, parent: int, child: int, chance: float) -> None:
        """Expand a likely child of `parent` on the next level, unless it has been expanded.

        It may be a leaf that a likely token was merged into: unlikely where it was drafted, likely
        here, so it grows on.
        """
        if child in self.scores:
            return
        reach = self.graph.reach
        if reach[parent] * chance > reach[child]:
            reach[child] = reach[parent] * chance
            self.merged[child] = parent, chance
        self.frontier[child] = None

    def _hang_ranks(
        self, tree: RankTree, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> list[int | None]:
        """The children that a tree of ranks has there; those with children of their own grow on."""
        above = self.paths[node]
        hung: list[int | None] = []
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            path = (*above, rank)
            if path not in tree.places or chance <= 0:
                hung.append(None)
                continue
            child = self.graph.hang(node, token, chance)
            self.paths[child] = path
            if path in tree.inner:
                self.frontier[child] = None
            hung.append(child)
        return hung


def expanded_subtree(graph: TokenGraph, ran: Sequence[int]) -> tuple[list[int], list[int]]:
    """Tokens of the nodes of a graph that ran, and where among these their parents are."""
    places = {node: place for place, node in enumerate(ran)}
    parents = [places.get(graph.parents[node], -1) for node in ran]
    return [graph.tokens[node] for node in ran], parents
