"""The token graph: drafted tokens whose repeated runs are drafted once.

Different hypotheses often continue with the same words. If a new token and the `merge_length`
tokens before it repeat those of an existing node, its parent gets an edge to that node instead of a
new child, so all nodes below are shared (Gong et al. 2024, arXiv 2407.16207). Every path from the
root is a draft; `unmerge` returns the best ones as a tree for the target.

`merge_length` r compares r + 1 tokens. The paper's Table 5 counts tau = r (tau = 0 merges equal
tokens whatever comes before them), its text tau = r + 1; a larger value merges less.

The graph is acyclic by construction: an edge that would close a cycle is not made.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class UnmergedTree:
    """Paths of a graph as a tree.

    Attributes:
        tokens, parents: see `DraftTree.from_rows`.
        nodes: per tree node its graph node.
        merged: per tree node True if the edge above it is a merge edge.
        probs: per tree node the probability of the edge above it, 1 for the root. Below a merge
            edge the draft model predicted it on another path.
    """

    tokens: list[int]
    parents: list[int]
    nodes: list[int]
    merged: list[bool]
    probs: list[float]


class TokenGraph:
    """A draft of one row under construction; node 0 is the root, the last token of `context`.

    Args:
        context: the committed tokens.
        merge_length: number of tokens before a node that must agree for a merge; None never merges.

    Attributes:
        tokens: per node its token.
        parents: per node the node it was drafted under, -1 for the root.
        depth: per node its depth along parents.
        probs: per node its draft probability after its parent, 1 for the root.
        reach: per node the probability of the path along parents. Expanding a node over a more
            probable merge edge raises it.
        edges: per node (child, probability) in order of rank, merge edges included.
        num_merges: number of merge edges.
    """

    def __init__(self, context: Sequence[int], merge_length: int | None = None):
        self.tokens = [context[-1]]
        self.parents = [-1]
        self.depth = [0]
        self.probs = [1.0]
        self.reach = [1.0]
        self.edges: list[list[tuple[int, float]]] = [[]]
        self.num_merges = 0
        self.merge_length = merge_length
        self._history = tuple(context[-(merge_length or 0) - 1 : -1])
        self._index: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, probability: float) -> int | None:
        """Draft `token` below `parent`; return its node, None if it was merged into another."""
        run = None
        if self.merge_length is not None:
            run = (*self._tail(parent, self.merge_length), token)
            for node in self._index[run]:
                if not self._reaches(node, parent):
                    self.edges[parent].append((node, probability))
                    self.num_merges += 1
                    return None
        node = self.add_node(parent, token, probability)
        if run is not None:
            self._index[run].append(node)
        return node

    def add_node(self, parent: int, token: int, probability: float = 1.0) -> int:
        """Draft `token` without merging, and return its node."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depth.append(self.depth[parent] + 1)
        self.probs.append(probability)
        self.reach.append(self.reach[parent] * probability)
        self.edges.append([])
        self.edges[parent].append((node, probability))
        return node

    def path(self, node: int) -> list[int]:
        """Return the tokens from the root's child down to `node`, along parents."""
        tokens = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def spell_out(self) -> UnmergedTree:
        """Return the nodes in order of drafting, without merge edges."""
        count = len(self)
        nodes, merged = list(range(count)), [False] * count
        return UnmergedTree(self.tokens, self.parents, nodes, merged, self.probs)

    def unmerge(self, max_nodes: int, max_depth: int) -> UnmergedTree:
        """Return the most probable paths as a tree; ties go to the path found first."""
        tree = UnmergedTree([self.tokens[0]], [-1], [0], [False], [1.0])
        depth = [0]
        counter = 0
        heap: list[tuple[float, int, int, int, float]] = []
        index, reach = 0, 1.0
        while True:
            if depth[index] < max_depth:
                node = tree.nodes[index]
                for child, probability in self.edges[node]:
                    counter += 1
                    heapq.heappush(heap, (-reach * probability, counter, index, child, probability))
            if not heap or len(tree.nodes) > max_nodes:
                return tree
            below, _, above, node, probability = heapq.heappop(heap)
            index, reach = len(tree.nodes), -below
            tree.tokens.append(self.tokens[node])
            tree.parents.append(above)
            tree.merged.append(self.parents[node] != tree.nodes[above])
            tree.nodes.append(node)
            tree.probs.append(probability)
            depth.append(depth[above] + 1)

    def _tail(self, node: int, length: int) -> tuple[int, ...]:
        tokens: list[int] = []
        while node >= 0 and len(tokens) < length:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        start = max(0, len(self._history) - (length - len(tokens)))
        return (*self._history[start:], *reversed(tokens))

    def _reaches(self, start: int, goal: int) -> bool:
        """Return True if an edge goal -> start would close a cycle: `goal` is `start` or below."""
        seen = {start}
        stack = [start]
        while stack:
            node = stack.pop()
            if node == goal:
                return True
            for child, _ in self.edges[node]:
                if child not in seen:
                    seen.add(child)
                    stack.append(child)
        return False


def position_graph(
    root: int,
    tokens: Sequence[Sequence[int]],
    chances: Sequence[Sequence[float]],
    ends: Callable[[int], bool],
) -> TokenGraph:
    """Return the graph of positions predicted at once: each token may follow each one before it.

    Args:
        root: the last committed token.
        tokens: per position the predicted tokens, most probable first.
        chances: their probabilities; tokens with probability 0 are left out.
        ends: True for tokens that end a sequence; nothing follows them.
    """
    graph = TokenGraph([root])
    before = [0]
    for candidates, likely in zip(tokens, chances, strict=True):
        after = []
        for token, chance in zip(candidates, likely, strict=True):
            if chance > 0:
                node = graph.add_node(before[0], token, chance)
                for other in before[1:]:
                    graph.edges[other].append((node, chance))
                if not ends(token):
                    after.append(node)
        before = after
        if not before:
            break
    return graph
