"""Two published sampling rules that change the output distribution, for the option `lossy`.

Both decide for many branches at once which nodes are accepted, keep the longest accepted path and
sample a fresh bonus token after it.
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
    """Keep the longest accepted path; unsupported if a processor may keep state between calls."""

    def __init__(self, processors: Sequence[Any], num_rows: int):
        super().__init__(processors, num_rows)
        for processor in processors:
            if not len(NodeProcessors([processor], num_rows, stateless_only=True)):
                raise UnsupportedError(
                    f"lossy=True also processes the scores of rejected branches, which "
                    f"{type(processor).__name__} might remember; leave lossy out when sampling "
                    "with custom logits processors"
                )
        self._next: dict[int, int] = {}

    @abstractmethod
    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        """Return nodes whose whole path is accepted, including the roots of unfinished rows."""

    def _begin(self, tree: DraftTree, walk: Walk) -> None:
        accepted = self._accept(tree, walk)
        self._next = {}
        for row in walk.state.unfinished:
            # Nodes are in order of probability, and max() returns the first of equals.
            candidates = [node for node in tree.nodes(row) if node in accepted]
            node = max(candidates, key=lambda node: tree.depth[node])
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
    """Rule of SDSAT: every path samples its own tokens and the longest match wins. Lossy.

    Each path from the root to a leaf samples one target token at every node it passes,
    independently of all other paths. It is accepted as far as its draft tokens equal the sampled
    ones. So a draft token has one chance per path through it and another one as the bonus token:
    with ten paths through a child of probability p it is emitted with probability 1 - (1 - p)^10 or
    more, which is more often than the target would emit it. See Liu et al. 2024, arXiv 2403.18647,
    section 2.1.2, and the released code, which leaves out top-k; here all logits processors apply.
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        accepted = {tree.row_start[row] for row in walk.state.unfinished}
        alive = [(row, path) for row in walk.state.unfinished for path in _paths(tree, row)]
        depth = 0
        while alive := [(row, path) for row, path in alive if len(path) > depth + 1]:
            # Paths share the scores of a node, and each of them draws.
            at = {path[depth]: (row, path) for row, path in alive}
            prefixes = [[tree.tokens[n] for n in path[1 : depth + 1]] for _, path in at.values()]
            scores = walk.scores_of([row for row, _ in at.values()], list(at), prefixes)
            index_of = {node: index for index, node in enumerate(at)}
            probs = scores.softmax(dim=-1)[[index_of[path[depth]] for _, path in alive]]
            drawn = draw_or_none(probs).tolist()
            depth += 1
            alive = [
                (row, path)
                for (row, path), token in zip(alive, drawn, strict=True)
                if tree.tokens[path[depth]] == token
            ]
            accepted.update(path[depth] for _, path in alive)
        return accepted


class IndependentAcceptance(LongestPath):
    """Rule of GSD: every node is accepted independently and the longest path wins. Lossy.

    A child x with draft probability q(x) is accepted with probability min(1, p(x) / q(x)), where p
    is the target's distribution. The longest fully accepted path is kept, the most probable one if
    there are several, and a bonus token is sampled from p after it. This is biased towards draft
    tokens: a rejected token may return as the bonus token, each sibling has a chance of its own,
    and longer paths win (Gong et al. 2024, arXiv 2407.16207, verification with sampling).
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        level = [(row, tree.row_start[row]) for row in walk.state.unfinished]
        paths: dict[int, list[int]] = {root: [] for _, root in level}
        while level := [(row, node) for row, node in level if tree.children[node]]:
            rows, nodes = [row for row, _ in level], [node for _, node in level]
            target_probs = walk.scores_of(rows, nodes, [paths[n] for n in nodes]).softmax(dim=-1)
            assert tree.node_probs is not None, "graphs have node probabilities"
            level = []
            for row, node, probs in zip(rows, nodes, target_probs, strict=True):
                for child in tree.children[node]:
                    token = tree.tokens[child]
                    uniform = float(torch.rand((), dtype=torch.float32))
                    if uniform * tree.node_probs[child] < float(probs[token]):
                        paths[child] = [*paths[node], token]
                        level.append((row, child))
        return set(paths)


def _paths(tree: DraftTree, row: int) -> list[list[int]]:
    """Return the nodes of every path from the root of `row` to a leaf."""
    paths = []
    for leaf in tree.nodes(row):
        # Virtual nodes belong to no path.
        if tree.tokens[leaf] < 0 or tree.proposals(leaf):
            continue
        path = [leaf]
        while (above := tree.parent[path[-1]]) >= 0:
            path.append(above)
        paths.append(path[::-1])
    return paths
