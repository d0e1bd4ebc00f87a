"""The draft tree: a ragged batch of token trees.

A chain and a batch of one are special cases. Node 0 of each row is its *root*, the last committed
token, whose keys and values are not stored yet. A finished row has no nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Token trees of B rows with N nodes in total, row by row; built by `from_drafts`.

    A node with a negative token id is *virtual*: the target runs it, but it proposes no token. No
    token equals it, so it is never accepted, and its keys and values are dropped with those of the
    rejected nodes (see `hf_spec.engine.forward.node_tokens`).

    Attributes:
        tokens: token id of each of the N nodes.
        parent: index of each node's parent, -1 for a root. Parents precede children.
        depth: depth of each node, 0 for a root; its position is the root's position + depth.
        row_start: B + 1 indices where each row begins and the last one ends.
        draft_probs: (N, V) float32 or None; row i is the distribution that the children of node i
            were drawn from, after every processor. Only for sampled drafts.
        node_probs: the draft model's probability of each node's token, 1 for a root; or None. In a
            token graph, a copy has the probability of its edge.
    """

    tokens: list[int]
    parent: list[int]
    depth: list[int]
    row_start: list[int]
    draft_probs: Tensor | None = None
    node_probs: list[float] | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Sequence[tuple[Sequence[int], Sequence[int]]],
        draft_probs: Tensor | None = None,
        node_probs: list[float] | None = None,
    ) -> DraftTree:
        """Build a tree from one (tokens, parents) pair per row, both empty for a finished row.

        Parents are indices within the row, -1 for the root. Raises `ValueError` if a row does not
        start with its only root or a parent follows its child.
        """
        tokens: list[int] = []
        parent: list[int] = []
        depth: list[int] = []
        row_start = [0]
        for index, (row_tokens, row_parents) in enumerate(rows):
            base = len(tokens)
            if len(row_tokens) != len(row_parents):
                raise ValueError(
                    f"row {index} has {len(row_tokens)} tokens and {len(row_parents)} parents"
                )
            for node, above in enumerate(row_parents):
                if (above < 0) != (node == 0) or above >= node:
                    raise ValueError(f"row {index}: node {node} cannot have parent {above}")
                parent.append(base + above if node else -1)
                depth.append(depth[base + above] + 1 if node else 0)
            tokens.extend(row_tokens)
            row_start.append(len(tokens))
        return cls(tokens, parent, depth, row_start, draft_probs, node_probs)

    @classmethod
    def from_drafts(
        cls,
        drafts: Mapping[int, tuple[Sequence[int], Sequence[int]]],
        num_rows: int,
        draft_probs: Tensor | None = None,
        node_probs: list[float] | None = None,
    ) -> DraftTree:
        """Build a tree from row -> (tokens, parents), see `from_rows`; other rows have no nodes."""
        rows = [drafts.get(row, ((), ())) for row in range(num_rows)]
        return cls.from_rows(rows, draft_probs, node_probs)

    @property
    def num_nodes(self) -> int:
        """Number of nodes N, roots included."""
        return len(self.tokens)

    @property
    def num_rows(self) -> int:
        """Number of rows B, finished ones included."""
        return len(self.row_start) - 1

    def nodes(self, row: int) -> range:
        """Return the indices of the nodes of `row`; the first one is its root."""
        return range(self.row_start[row], self.row_start[row + 1])

    @cached_property
    def children(self) -> list[list[int]]:
        """Indices of each node's children, in the order they were added (by rank)."""
        children: list[list[int]] = [[] for _ in self.tokens]
        for node, above in enumerate(self.parent):
            if above >= 0:
                children[above].append(node)
        return children

    def proposals(self, node: int) -> list[int]:
        """Return the children of `node` that are not virtual."""
        return [child for child in self.children[node] if self.tokens[child] >= 0]

    def child(self, node: int, token: int) -> int | None:
        """Return the child of `node` with this token, or None."""
        for child in self.children[node]:
            if self.tokens[child] == token:
                return child
        return None

    def num_drafted(self, row: int) -> int:
        """Return the number of tokens that the draft of `row` proposes."""
        drafted = self.tokens[self.row_start[row] + 1 : self.row_start[row + 1]]
        return len([token for token in drafted if token >= 0])

    def height(self, row: int) -> int:
        """Return the depth of the deepest token of `row`; 0 for a root alone or a finished row."""
        return max([self.depth[n] for n in self.nodes(row) if self.tokens[n] >= 0], default=0)

    @cached_property
    def ancestor_mask(self) -> Tensor:
        """(N, W) bool on the host: ancestors of each node, itself included.

        W is the number of nodes in the largest row; columns count from the row's root.
        """
        starts = self.row_start
        width = max(end - start for start, end in pairwise(starts))
        # Small operations of PyTorch take several times as long as those of NumPy.
        mask = np.zeros((self.num_nodes, width), dtype=bool)
        for start, end in pairwise(starts):
            for node in range(start, end):
                if node > start:
                    mask[node] = mask[self.parent[node]]
                mask[node, node - start] = True
        return torch.from_numpy(mask)


@dataclass(frozen=True)
class Verdict:
    """Result of verifying a draft tree.

    Attributes:
        tree: the verified tree.
        accepted: per row the accepted nodes in path order, without the root; indices into the tree.
        bonus: per row the target's own token after the last accepted one, None for finished rows.
        scores: per row the processed scores of every committed token (accepted ones, then the
            bonus), each (V,) float32; None if they were not requested.
        logits: the scores before the processors.
    """

    tree: DraftTree
    accepted: list[list[int]]
    bonus: list[int | None]
    scores: list[list[Tensor]] | None = None
    logits: list[list[Tensor]] | None = None

    def tokens(self, row: int) -> list[int]:
        """Return the tokens that `row` gains: the accepted ones, then the bonus token."""
        bonus = self.bonus[row]
        if bonus is None:
            return []
        return [self.tree.tokens[node] for node in self.accepted[row]] + [bonus]

    @property
    def paths(self) -> list[list[int]]:
        """Per row the accepted nodes, counted from the row's root."""
        starts = self.tree.row_start
        return [
            [node - start for node in row]
            for row, start in zip(self.accepted, starts, strict=False)
        ]


def by_likelihood(parents: Sequence[int], node_probs: Sequence[float]) -> list[int]:
    """Sort the nodes of a row's tree by the probability of their path, parents before children.

    `parents` begins with the root's -1; `node_probs` are probabilities given the tokens above.
    """
    reach = [1.0]
    for parent, prob in zip(parents[1:], node_probs[1:], strict=True):
        reach.append(reach[parent] * prob)
    return sorted(range(len(reach)), key=lambda node: -reach[node])


def likeliest(
    parents: Sequence[int], node_probs: Sequence[float], count: int | None
) -> tuple[list[int], list[int]]:
    """Select the `count` likeliest nodes of a row's tree beside the root; None selects all.

    Returns them in their order, the root first, and the index of each one's parent among them.
    """
    if count is None or len(parents) <= count + 1:
        return list(range(len(parents))), list(parents)
    selected = sorted(by_likelihood(parents, node_probs)[: count + 1])
    new_index = {node: index for index, node in enumerate(selected)}
    return selected, [-1, *(new_index[parents[node]] for node in selected[1:])]
