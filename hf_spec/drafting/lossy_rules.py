"""Two published sampling rules that change the distribution of the output.

Both decide of many branches at once which are accepted, keep the longest path of them and let a
fresh draw follow it. Which nodes are accepted is what they differ in. The strategies offer them as
options called `lossy`; `NodeDraw` is exact where they are not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hf_spec.common.errors import UnsupportedError
from hf_spec.engine.decode.logits_processors import NodeProcessors
from hf_spec.engine.decode.sampling import draw_or_none
from hf_spec.engine.decode.verifiers import Verifier, Walk
from hf_spec.engine.forward.draft_tree import DraftTree


class LongestPath(Verifier):
    """Keeps the longest accepted path and draws a bonus token after it. Lossy.

    A processor that may remember earlier calls is refused.
    """

    def __init__(self, processors: Sequence[Any], num_rows: int):
        super().__init__(processors, num_rows)
        for processor in processors:
            if not len(NodeProcessors([processor], num_rows, stateless_only=True)):
                raise UnsupportedError(
                    f"lossy=True asks for the scores of branches that are not taken, which "
                    f"{type(processor).__name__} might remember; leave lossy away when sampling "
                    "with a processor of your own"
                )
        self._next: dict[int, int] = {}

    @abstractmethod
    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        """Nodes whose whole path is accepted, the roots of unfinished rows included."""

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        """Find the longest accepted path of every row."""
        accepted = self._accept(tree, walk)
        self._next = {}
        for row in walk.state.unfinished:
            # Nodes come in order of probability, and max() takes the first of equals.
            mine = [node for node in tree.nodes(row) if node in accepted]
            node = max(mine, key=lambda node: tree.depth[node])
            while (above := tree.parent[node]) >= 0:
                self._next[above] = node
                node = above

    def _step(
        self, tree: DraftTree, walk: Walk, here: dict[int, int], paths: dict[int, list[int]]
    ) -> dict[int, tuple[int, int | None]]:
        probs = walk.visit(here, paths).softmax(dim=-1)
        drawn = draw_or_none(probs)
        steps: dict[int, tuple[int, int | None]] = {}
        for (row, node), bonus in zip(here.items(), drawn.tolist(), strict=True):
            child = self._next.get(node)
            steps[row] = (bonus if child is None else tree.tokens[child], child)
        return steps


class PathSampling(LongestPath):
    """SDSAT's: every path draws its own tokens, and the longest match wins. Lossy.

    Each path from the root to a leaf draws a token of the target's distribution at every node it
    passes, apart from all other paths, and is accepted as far as its own tokens are what was drawn.
    The longest is kept and a fresh bonus token drawn after it. So a drafted token has a chance per
    path through it and another one as the bonus: with ten paths through one child of probability p
    it is taken with probability 1 - (1 - p)^10 or more. Drafted tokens come more often than the
    target would say them (Liu et al. 2024, arXiv 2403.18647, section 2.1.2, after the released
    code, but with every processor of the user where that code leaves top-k out).
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        rows = {row: tree.nodes(row) for row in walk.state.unfinished}
        accepted = {nodes[0] for nodes in rows.values()}
        # Virtual nodes are on no path.
        tokens = [(row, node) for row, nodes in rows.items() for node in nodes]
        tokens = [(row, node) for row, node in tokens if tree.tokens[node] >= 0]
        inner = [(row, node) for row, node in tokens if tree.proposals(node)]
        if not inner:
            return accepted
        known: dict[int, list[int]] = {}
        for _, node in tokens:
            above = tree.parent[node]
            known[node] = [] if above < 0 else [*known[above], tree.tokens[node]]
        owners, nodes = [row for row, _ in inner], [node for _, node in inner]
        scores = walk.scores_of(owners, nodes, [known[node] for node in nodes])
        probs = dict(zip(nodes, scores.softmax(dim=-1), strict=True))
        for _, leaf in tokens:
            if tree.proposals(leaf):
                continue
            path = [leaf]
            while tree.parent[path[-1]] >= 0:
                path.append(tree.parent[path[-1]])
            for node in path[-2::-1]:
                if int(draw_or_none(probs[tree.parent[node]][None])) != tree.tokens[node]:
                    break
                accepted.add(node)
        return accepted


class IndependentAcceptance(LongestPath):
    """GSD's: every node is accepted or not, apart from all others. Lossy.

    A child x with draft probability q is accepted with probability min(1, p / q), p being the
    target's. Of the paths that are accepted whole the longest is kept (the most probable one if
    several are), and a bonus token drawn from the target's distribution follows it. Nothing makes
    up for what that prefers: a refused token may come back as the bonus, a sibling has a chance of
    its own, and longer paths win. So tokens that the draft model proposes come more often than the
    target would say them (Gong et al. 2024, arXiv 2407.16207, verification when sampling).
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        """Found level by level."""
        level = [(row, tree.row_start[row]) for row in walk.state.unfinished]
        paths: dict[int, list[int]] = {root: [] for _, root in level}
        while level := [(row, node) for row, node in level if tree.children[node]]:
            rows, nodes = [row for row, _ in level], [node for _, node in level]
            target_probs = walk.scores_of(rows, nodes, [paths[n] for n in nodes]).softmax(dim=-1)
            assert tree.node_probs is not None, "drafted graphs carry the probability of each node"
            level = []
            for row, node, probs in zip(rows, nodes, target_probs, strict=True):
                for child in tree.children[node]:
                    token = tree.tokens[child]
                    if float(torch.rand(())) * tree.node_probs[child] < float(probs[token]):
                        paths[child] = [*paths[node], token]
                        level.append((row, child))
        return set(paths)
