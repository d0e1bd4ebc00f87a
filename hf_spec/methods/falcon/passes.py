"""A rank tree made ready for a Falcon head: which numbers each pass picks, as index tensors.

A head that predicts k depths at once runs a tree in *passes* (Gao et al. 2024, arXiv 2412.12639,
section 3.3). The first has one block, which gives the lists of depths 1 to k. Every node at depth k
that has children becomes a block of the second, fed with the tokens of the k nodes that lead to it;
it gives the lists of depths k + 1 to 2k below that node; and so on. Within a block a node's token
depends on its own rank alone, not on the nodes above it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.methods.feature_pairs.runner import Blocks


@dataclass(frozen=True)
class DraftPass:
    """One pass over n blocks of k pairs, the same for every row.

    Attributes:
        blocks: where they stand; of no meaning in the first pass, which runs true pairs.
        parents: (n,) int64, the block before each, among those of the pass before.
        fed: (n * k,) int64, the entry of the pass before that gives each token.
        lines: (M,) int64, which of the n * k outputs are read as lists of `num_ranks`; entry e of
            the pass is rank e % num_ranks of list e // num_ranks.
    """

    blocks: Blocks
    parents: Tensor
    fed: Tensor
    lines: Tensor
    num_ranks: int


@dataclass(frozen=True)
class DraftPlan:
    """All passes of a tree.

    Attributes:
        passes: in order.
        entries: per node of the tree its entry, counted over the entries of all passes.
        parents: per node, the root of the draft tree first, its parent in the draft tree.
        within: per depth from 0 how many nodes lie at it or above, the root left out.
    """

    passes: tuple[DraftPass, ...]
    entries: list[int]
    parents: list[int]
    within: list[int]

    @property
    def height(self) -> int:
        """Depth of the deepest node."""
        return len(self.within) - 1


@functools.lru_cache(maxsize=64)
def draft_plan(tree: RankTree, block_size: int) -> DraftPlan:
    """The passes that draft `tree` with a head of `block_size`."""
    passes: list[DraftPass] = []
    entries: list[int] = []
    # Blocks go by the path that leads to them. These rest on predicted features, those of the last
    # pass apart; `found` has the entries of the nodes of that pass.
    drafted: list[Path] = []
    before: list[Path] = []
    found: dict[Path, int] = {}
    base = 0
    for depth in range(0, tree.height, block_size):
        nodes = [path for path in tree.paths if depth < len(path) <= depth + block_size]
        blocks = list(dict.fromkeys(path[:-1] for path in nodes if len(path) == depth + 1))
        fed, parents = [], []
        if depth:
            drafted += blocks
            ends = range(depth - block_size + 1, depth + 1)
            fed = [found[block[:end]] for block in blocks for end in ends]
            parents = [before.index(block[:-block_size]) for block in blocks]
        slots = [blocks.index(path[:depth]) * block_size + len(path) - depth - 1 for path in nodes]
        lines, num_ranks = sorted(set(slots)), max(path[-1] for path in nodes) + 1
        passes.append(
            DraftPass(
                _placed(blocks, drafted, depth, block_size),
                torch.tensor(parents, dtype=torch.long),
                torch.tensor(fed, dtype=torch.long),
                torch.tensor(lines),
                num_ranks,
            )
        )
        places = [lines.index(slot) * num_ranks for slot in slots]
        found = {path: place + path[-1] for path, place in zip(nodes, places, strict=True)}
        entries += [base + entry for entry in found.values()]
        base += len(lines) * num_ranks
        before = blocks
    within = [sum(depth <= d for depth in tree.depths) for d in range(tree.height + 1)]
    return DraftPlan(tuple(passes), entries, [-1, *(above + 1 for above in tree.parents)], within)


def _placed(blocks: list[Path], drafted: list[Path], depth: int, size: int) -> Blocks:
    """Where the blocks of a pass stand among all that are `drafted` so far, themselves included."""
    offsets = [len(block) - size + slot for block in drafted for slot in range(size)]
    visible = None
    if depth:
        # A block descends from those that lie on its path.
        seen = torch.tensor([[b[: len(other)] == other for other in drafted] for b in blocks])
        visible = seen.repeat_interleave(size, 0).repeat_interleave(size, -1)
        visible = None if bool(visible.all()) else visible
    begin = len(drafted) - len(blocks)
    return Blocks(
        begin, len(blocks), depth - size, torch.tensor(offsets, dtype=torch.long), visible
    )
