"""Drafts under construction.

`Growth` is what a drafter sees of the drafts of a batch: the nodes of the next pass, which are
chosen on the host after every pass. `hf_spec.drafting.device_growth.DeviceGrowth` chooses them on
the device. Both add the drafted tokens to one `RowGrowth` per row, so both build the same drafts.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_spec.backend.device.transfer import fetch_all, send
from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.drafting.token_graph import TokenGraph


@dataclass(frozen=True)
class TreeShape:
    """Bounds of a draft, named like the options of the configs; a chain by default.

    Attributes:
        tree: the nodes of the draft as rank paths; None grows the most probable paths.
        whole: draft all of `tree` in every round, also nodes with probability 0 and those after an
            end token.
        levels_per_pass: levels that one pass of the drafter predicts; more than 1 requires `whole`.
        children: most children per node, without `tree`.
        expanded_per_level: most nodes per level that are expanded, without `tree`.
        max_nodes: most nodes that are sent to the target.
        min_probability: draft probability below which a node is not expanded.
        min_sibling_ratio: share of the best sibling's probability below which a node is dropped.
        merge_length: see `TokenGraph`.
        max_draft_nodes: number of drafted nodes at which growth stops.
    """

    tree: RankTree | None = None
    whole: bool = False
    levels_per_pass: int = 1
    children: int = 1
    expanded_per_level: int = 1
    max_nodes: int = sys.maxsize
    min_probability: float = 0.0
    min_sibling_ratio: float = 0.0
    merge_length: int | None = None
    max_draft_nodes: int = sys.maxsize

    @property
    def num_ranks(self) -> int:
        """Most children of a node."""
        return self.children if self.tree is None else self.tree.num_ranks


@dataclass(frozen=True)
class NextTokens:
    """Tokens that may follow the M nodes of a pass, by level; one level but for Falcon.

    Attributes:
        tokens: (M, levels, ranks) int64, most probable or first drawn first.
        chances: (M, levels, ranks) draft probabilities.
        probs: (M, R) distributions that the tokens were drawn from; None for top tokens.
        scores: (M, levels), the length policy's scores of the distributions.
    """

    tokens: Tensor
    chances: Tensor
    probs: Tensor | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class NextLists:
    """`NextTokens` of one row on the host."""

    tokens: Sequence[Sequence[Sequence[int]]]
    chances: Sequence[Sequence[Sequence[float]]]
    probs: Tensor | None = None
    scores: Sequence[Sequence[float]] | None = None


@dataclass
class RowGrowth:
    """Draft of one row under construction.

    Attributes:
        graph: the drafted tokens.
        ends: True for tokens that end a sequence.
        drawn: True if its tokens are drawn at random.
        levels: number of levels so far.
        frontier: the nodes to expand next, in order.
        expanded_nodes: the nodes that passes have run, in that order, the root first; -1 for
            padding.
        last_level: the children added to the newest level, None for tokens that were dropped.
        distributions: node -> the distribution that its children were drawn from.
        scores: expanded node -> the length policy's score of what follows it.
        paths: node -> its rank path, in a tree of ranks.
        merged: nodes more probable over a merge edge than over their own -> its parent and
            probability.
    """

    graph: TokenGraph
    shape: TreeShape
    ends: Callable[[int], bool]
    max_levels: int = sys.maxsize
    drawn: bool = False
    levels: int = 0
    # A dict as an ordered set: wide drafts look up thousands of nodes here.
    frontier: dict[int, None] = field(default_factory=lambda: {0: None})
    expanded_nodes: list[int] = field(default_factory=list)
    last_level: list[int | None] = field(default_factory=lambda: [0])
    distributions: dict[int, Tensor] = field(default_factory=dict)
    scores: dict[int, float] = field(default_factory=dict)
    paths: dict[int, Path] = field(default_factory=lambda: {0: ()})
    merged: dict[int, tuple[int, float]] = field(default_factory=dict)

    def begin_pass(self, nodes: Sequence[int | None] | None = None) -> list[int]:
        """Return the nodes of the next pass, by default the frontier, which is emptied.

        Of `nodes` that a device has run, those outside the frontier count as padding.
        """
        running = list(self.frontier)
        if nodes is not None:
            running = [node if node is not None and node in self.frontier else -1 for node in nodes]
        self.expanded_nodes += running
        self._begin_level(running)
        return running

    def add_levels(self, nodes: Sequence[int], lists: NextLists) -> None:
        """Add what follows the `nodes` of `begin_pass`, level by level; nothing follows -1."""
        indices = list(range(len(nodes)))
        num_levels = min(len(lists.tokens[0]), self.max_levels - self.levels)
        self.levels += num_levels
        for level in range(num_levels):
            if level:
                index_of = dict(zip(nodes, indices, strict=True))
                nodes = list(self.frontier)
                indices = [index_of[self.graph.parents[node]] for node in nodes]
                self._begin_level(nodes)
            for node, index in zip(nodes, indices, strict=True):
                tokens, chances = lists.tokens[index][level], lists.chances[index][level]
                if node < 0:
                    self.last_level += [None] * len(tokens)
                    continue
                if lists.scores is not None:
                    self.scores[node] = lists.scores[index][level]
                if lists.probs is not None:
                    self.distributions[node] = lists.probs[index]
                self.last_level += self._add_children(node, tokens, chances)
            self._narrow()

    def _add_children(
        self, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> list[int | None]:
        """Add the children of a node; return per token the new node, None if it was dropped."""
        if self.shape.tree is not None:
            return self._add_ranks(self.shape.tree, node, tokens, chances)
        # The drawn token must not decide whether a child is sent, or the draft would no longer
        # follow `draft_probs`: sampled trees stop growing by count alone.
        if self.drawn and len(self.graph) + len(tokens) > self.shape.max_nodes + 1:
            return [None] * len(tokens)
        return [
            self._add_child(node, token, chance, chances[0])
            for token, chance in zip(tokens, chances, strict=True)
        ]

    def _narrow(self) -> None:
        """Keep the most probable nodes of the frontier; nothing follows a token that `ends`."""
        if self.shape.whole:
            return
        graph, reach = self.graph, self.graph.reach
        if len(graph) > self.shape.max_draft_nodes:
            self.frontier = {}
        alive = [node for node in self.frontier if not self.ends(graph.tokens[node])]
        most = len(alive) if self.shape.tree else self.shape.expanded_per_level
        best = heapq.nsmallest(most, alive, key=lambda node: -reach[node])
        self.frontier = dict.fromkeys(sorted(best))

    def pass_parent(self, node: int) -> int:
        """Return the node of the pass before that `node` descends from, -1 for the root."""
        for _ in range(self.shape.levels_per_pass if node else 1):
            node = self.graph.parents[node]
        return node

    def pass_tokens(self, node: int) -> list[int]:
        """Return the tokens after `pass_parent(node)` up to `node`; of the root its own."""
        return self.graph.path(node)[-self.shape.levels_per_pass :] or self.graph.tokens[:1]

    def expanded_subtree(self) -> tuple[list[int], list[int]]:
        """Return the tokens of `expanded_nodes`, and where in that list their parents are."""
        nodes = self.expanded_nodes
        indices = {node: index for index, node in enumerate(nodes)}
        parents = [indices.get(self.pass_parent(node), -1) for node in nodes]
        return [self.graph.tokens[node] for node in nodes], parents

    def _begin_level(self, nodes: Sequence[int]) -> None:
        self.frontier, self.last_level = {}, []
        # Before any of them has children, which may be merged into one of the others.
        self.scores |= dict.fromkeys(nodes, 0.0)

    def _add_child(self, node: int, token: int, chance: float, best: float) -> int | None:
        pruned = chance < self.shape.min_sibling_ratio * best and not self.drawn
        if chance <= 0 or pruned or len(self.graph) > self.shape.max_draft_nodes:
            return None
        child = self.graph.add(node, token, chance)
        if chance >= self.shape.min_probability:
            self._add_to_frontier(node, self.graph.edges[node][-1][0], chance)
        return child

    def _add_to_frontier(self, parent: int, child: int, chance: float) -> None:
        """Expand a probable child of `parent` on the next level, unless it has been expanded.

        The child may be a leaf that a probable token was merged into: improbable where it was
        drafted, probable here, so it grows on.
        """
        if child in self.scores:
            return
        reach = self.graph.reach
        if reach[parent] * chance > reach[child]:
            reach[child] = reach[parent] * chance
            self.merged[child] = parent, chance
        self.frontier[child] = None

    def _add_ranks(
        self, tree: RankTree, node: int, tokens: Sequence[int], chances: Sequence[float]
    ) -> list[int | None]:
        above = self.paths[node]
        children: list[int | None] = []
        for rank, (token, chance) in enumerate(zip(tokens, chances, strict=True)):
            path = (*above, rank)
            if path not in tree.node_index or (chance <= 0 and not self.shape.whole):
                children.append(None)
                continue
            child = self.graph.add_node(node, token, chance)
            self.paths[child] = path
            if path in tree.inner:
                self.frontier[child] = None
            children.append(child)
        return children


class Growth:
    """Drafts of some rows under construction; its *nodes* are those of the next pass.

    Their tokens are fetched after every pass, so a length policy can end it.

    Attributes:
        rows: the rows that grow, in order. Their nodes follow each other in this order.
        depth: depth of the nodes, 0 for the roots.
        visible: (M, bytes) uint8 as in `DeviceTokens`, the expanded nodes that each node descends
            from; None if `expanded_subtree` has the parents.
        tokens_on_device: True if the host does not know `tokens`.
        noise: (M, R) exponential random numbers to draw tokens with; None to make new ones.
    """

    visible: Tensor | None = None
    tokens_on_device: bool = False
    noise: Tensor | None = None

    def __init__(self, drafts: Mapping[int, RowGrowth]):
        self.depth = 0
        self._drafts = drafts
        self._indices = {(row, -1): index for index, row in enumerate(drafts)}
        self._begin(list(drafts))

    @property
    def tokens(self) -> Tensor:
        """(M * k,) int64, per node the tokens since its parent, k levels before; (M,) of roots."""
        parts = [self._drafts[row].pass_tokens(node) for row, node in self._row_nodes]
        return torch.tensor([token for part in parts for token in part])

    @property
    def parents(self) -> Tensor:
        """(M,) int64, which node of the pass before is the parent; of a root its index in rows."""
        above = [(row, self._drafts[row].pass_parent(node)) for row, node in self._row_nodes]
        return torch.tensor([self._indices[owner] for owner in above])

    @property
    def owners(self) -> list[int]:
        """The row of each node."""
        return [row for row in self.rows for _ in range(self.num_nodes(row))]

    def num_nodes(self, row: int) -> int:
        """Return the number of nodes of a row."""
        return len(self._nodes[row])

    def expanded_subtree(self, row: int) -> tuple[list[int], list[int]]:
        """Return tokens and parents of a row's expanded nodes, those of the next pass included.

        Tokens that only the device knows are replaced by the root's.
        """
        return self._drafts[row].expanded_subtree()

    def paths(self) -> list[list[int]]:
        """Return per node the tokens from the root's child down to it, if the host knows them."""
        return [self._drafts[row].graph.path(node) for row, node in self._row_nodes]

    def node_depths(self) -> list[int]:
        """Return the depth of each node; below merge edges it may be less than `depth`."""
        return [self._drafts[row].graph.depth[node] for row, node in self._row_nodes]

    def inputs_on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return `tokens` and `parents` on a device, sent there in one transfer."""
        tokens, parents = send([self.tokens, self.parents], device)
        return tokens, parents

    def add(self, following: NextTokens) -> None:
        """Add what follows the nodes; waits for the device."""
        probs, tensors = following.probs, [following.tokens, following.chances]
        fetched = fetch_all(tensors if following.scores is None else [*tensors, following.scores])
        start = 0
        for row, nodes in self._nodes.items():
            part = slice(start, start + len(nodes))
            tokens, chances, *scores = (values[part] for values in fetched)
            drawn_from = None if probs is None else probs[part]
            self._drafts[row].add_levels(nodes, NextLists(tokens, chances, drawn_from, *scores))
            start = part.stop
        self.depth += following.tokens.shape[1]

    def next_rows(self) -> list[int]:
        """Return the rows whose draft may grow by another pass."""
        drafts = self._drafts
        return [r for r in self.rows if self.depth < drafts[r].max_levels and drafts[r].frontier]

    def advance(self, rows: Sequence[int]) -> None:
        """Go on to the next pass, with some of the `next_rows`."""
        self._indices = {owner: index for index, owner in enumerate(self._row_nodes)}
        self._begin(rows)

    @property
    def _row_nodes(self) -> list[tuple[int, int]]:
        return [(row, node) for row, nodes in self._nodes.items() for node in nodes]

    def _begin(self, rows: Sequence[int]) -> None:
        self.rows = list(rows)
        self._nodes = {row: self._drafts[row].begin_pass() for row in rows}
