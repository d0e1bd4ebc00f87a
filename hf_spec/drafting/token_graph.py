"""The token graph: drafted tokens whose repeated runs are drafted once.

Different hypotheses often continue with the same words. When a new token would repeat an existing
node together with the `merge_length` tokens before it, its parent gets an edge to that node instead
of a node of its own, so that everything below is shared (Gong et al. 2024, arXiv 2407.16207). Every
path from the root is a draft; `unmerge` spells the best ones out as a tree for the target.

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
    """Paths of a graph as one tree.

    Attributes:
        tokens, parents: as `DraftTree.from_rows` takes them.
        nodes: per tree node the graph node it spells out.
        merged: per tree node whether the edge above it is a merge edge.
        probs: per tree node the probability of the edge above it, 1 for the root. Below a merge
            edge that is what the draft model said on another path.
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
        merge_length: tokens before a node that must agree for a merge; None never merges.

    Attributes:
        tokens: per node.
        parents, depth: per node the one it was drafted under, -1 for the root; along parents.
        probs, reach: per node its draft probability given the path to its parent, and that of the
            path along parents, 1 for the root. Whoever opens a node by a likelier edge may raise
            the latter.
        edges: per node (node, probability) in order of rank; merge edges included.
        num_merges: how many merge edges there are.
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
        """Draft `token`, which is no child of `parent` yet, with the draft model's probability.

        The new node, or None if the token was merged into an existing one.
        """
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
        """Draft `token` as a node of its own, which is returned."""
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
        """Tokens from the root's child down to `node`, along parents."""
        tokens = []
        while node:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        return tokens[::-1]

    def spell_out(self) -> UnmergedTree:
        """The drafted nodes as they are, in order of drafting, without merge edges."""
        count = len(self)
        nodes, merged = list(range(count)), [False] * count
        return UnmergedTree(self.tokens, self.parents, nodes, merged, self.probs)

    def unmerge(self, max_nodes: int, max_depth: int) -> UnmergedTree:
        """The most probable paths as a tree, root not counted; ties go to the path found first."""
        tree = UnmergedTree([self.tokens[0]], [-1], [0], [False], [1.0])
        depth = [0]
        counter = 0
        heap: list[tuple[float, int, int, int, float]] = []
        place, reach = 0, 1.0
        while True:
            if depth[place] < max_depth:
                node = tree.nodes[place]
                for child, probability in self.edges[node]:
                    counter += 1
                    heapq.heappush(heap, (-reach * probability, counter, place, child, probability))
            if not heap or len(tree.nodes) > max_nodes:
                return tree
            below, _, above, node, probability = heapq.heappop(heap)
            place, reach = len(tree.nodes), -below
            tree.tokens.append(self.tokens[node])
            tree.parents.append(above)
            tree.merged.append(self.parents[node] != tree.nodes[above])
            tree.nodes.append(node)
            tree.probs.append(probability)
            depth.append(depth[above] + 1)

    def _tail(self, node: int, length: int) -> tuple[int, ...]:
        """The last `length` tokens up to `node`, committed ones where the path is shorter."""
        tokens: list[int] = []
        while node >= 0 and len(tokens) < length:
            tokens.append(self.tokens[node])
            node = self.parents[node]
        known = max(0, len(self._history) - (length - len(tokens)))
        return (*self._history[known:], *reversed(tokens))

    def _reaches(self, start: int, goal: int) -> bool:
        """Whether `goal` is `start` or lies below it; an edge goal -> start would close a cycle."""
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


def place_graph(
    root: int,
    tokens: Sequence[Sequence[int]],
    chances: Sequence[Sequence[float]],
    ends: Callable[[int], bool],
) -> TokenGraph:
    """The graph of places that were predicted at once: each token may follow each one before it.

    Args:
        root: the last committed token.
        tokens: per place the predicted ones, the likeliest first.
        chances: their probabilities; tokens without any are left out.
        ends: whether a token ends a sequence; nothing follows it.
    """
    graph = TokenGraph([root])
    before = [0]
    for place, likely in zip(tokens, chances, strict=True):
        after = []
        for token, chance in zip(place, likely, strict=True):
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
