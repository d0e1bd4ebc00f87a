"""The sampling rule that SDSAT was published with, which changes the output's distribution."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_spec.decoding.verification import Walk
from hf_spec.drafting.longest_path import LongestPath
from hf_spec.execution.tree import DraftTree


class PathSampling(LongestPath):
    """Every path draws its own tokens, and the longest match wins. Lossy.

    Each path from the root to a leaf draws a token of the target's distribution at every node it
    passes, apart from all other paths, and is accepted as far as its own tokens are what was drawn.
    The longest is kept and a bonus token drawn anew behind it. So a drafted token has a chance per
    path through it and another one as the bonus: with ten paths through one child of probability p
    it is taken with probability 1 - (1 - p)^10 or more. Drafted tokens come more often than the
    target would say them (Liu et al. 2024, arXiv 2403.18647, section 2.1.2, after the released
    code, but with every processor of the user where that code leaves top-k out).
    """

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        accepted: set[int] = set()
        rows, nodes, paths = [], [], []
        for row in walk.state.unfinished:
            known: dict[int, list[int]] = {}
            for node in tree.nodes(row):
                above = tree.parent[node]
                if tree.tokens[node] < 0:
                    continue
                known[node] = [] if above < 0 else [*known[above], tree.tokens[node]]
                if above < 0:
                    accepted.add(node)
                if tree.proposals(node):
                    rows.append(row)
                    nodes.append(node)
                    paths.append(known[node])
        if not nodes:
            return accepted
        probs = dict(zip(nodes, walk.look(rows, nodes, paths).softmax(dim=-1), strict=True))
        for row in walk.state.unfinished:
            for node in tree.nodes(row):
                if tree.tokens[node] >= 0 and not tree.proposals(node):
                    accepted.update(_matched(tree.parent, tree.tokens, probs, node))
        return accepted


def _matched(
    parent: Sequence[int], tokens: Sequence[int], probs: Mapping[int, Tensor], leaf: int
) -> list[int]:
    """The nodes above and with `leaf` down to the first that is not what its path draws."""
    path = [leaf]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    matched = []
    for node in path[-2::-1]:
        drawn = int(torch.multinomial(probs[parent[node]], 1))
        if drawn != tokens[node]:
            break
        matched.append(node)
    return matched
