"""The common part of two published sampling rules that change the output's distribution.

Both decide of many branches at once which are accepted, keep the longest path of them and let a
fresh draw follow it. Which nodes are accepted is what they differ in. The strategies offer them as
options called `lossy`; `NodeDraw` is exact where they are not.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from hf_spec.decoding.processors import NodeProcessors
from hf_spec.decoding.verification import Verifier, Walk
from hf_spec.errors import UnsupportedError
from hf_spec.execution.tree import DraftTree


class LongestPath(Verifier):
    """Keeps the longest accepted path and draws a bonus token behind it. Lossy.

    Args:
        processors: the prepared list of `generate()`.
        num_rows: B.

    Raises:
        UnsupportedError: if one of them may remember earlier calls.
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
        drawn = torch.multinomial(probs, 1)[:, 0]
        steps: dict[int, tuple[int, int | None]] = {}
        for (row, node), bonus in zip(here.items(), drawn.tolist(), strict=True):
            child = self._next.get(node)
            steps[row] = (bonus if child is None else tree.tokens[child], child)
        return steps
