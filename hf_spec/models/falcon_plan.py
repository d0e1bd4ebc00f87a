"""A rank tree made ready for a Falcon head: which numbers each pass picks, as index tensors."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_spec.drafting.rank_tree import ListEntry, RankTree, TreePasses
from hf_spec.models.falcon_runner import Blocks


@dataclass(frozen=True)
class DraftPass:
    """One pass over n blocks of k pairs, the same for every row.

    Attributes:
        blocks: where they stand; of no meaning in the first pass, which runs true pairs.
        parents: (n,) int64, the block before each, among those of the pass before.
        fed: (n * k,) int64, the entry of the pass before that gives each token.
        lines: (M,) int64, which of the n * k outputs are read as lists.
        num_ranks: length of those lists. Entry e of a pass is rank e % num_ranks of list
            e // num_ranks.
        num_lists: M.
    """

    blocks: Blocks
    parents: Tensor
    fed: Tensor
    lines: Tensor
    num_ranks: int
    num_lists: int

    @functools.cached_property
    def host_parents(self) -> list[int]:
        """`parents` as a list."""
        return self.parents.tolist()

    @functools.cached_property
    def host_fed(self) -> list[list[int]]:
        """`fed` as a list per block."""
        count = max(len(self.parents), 1)
        return self.fed.view(count, -1).tolist()

    @functools.cached_property
    def host_lines(self) -> list[int]:
        """`lines` as a list."""
        return self.lines.tolist()


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
    tree_passes = tree.passes(block_size)
    passes: list[DraftPass] = []
    entries = [0] * len(tree)
    place_of: dict[ListEntry, int] = {}
    base = 0
    for index in range(tree_passes.num_passes):
        blocks = tree_passes.blocks(index)
        nodes = [n for n, entry in enumerate(tree_passes.entries) if entry.block in blocks]
        here = [tree_passes.entries[node] for node in nodes]
        lines = sorted({(e.block - blocks.start) * block_size + e.slot for e in here})
        num_ranks = max(e.rank for e in here) + 1
        above = tree_passes.blocks(index - 1).start if index else 0
        fed = [place_of[tree_passes.entries[n]] for b in blocks for n in tree_passes.nodes[b]]
        passes.append(
            DraftPass(
                _blocks(tree_passes, blocks, index),
                torch.tensor([tree_passes.parent[b] - above for b in blocks if b]),
                torch.tensor(fed, dtype=torch.long),
                torch.tensor(lines),
                num_ranks,
                len(lines),
            )
        )
        for node, e in zip(nodes, here, strict=True):
            line = lines.index((e.block - blocks.start) * block_size + e.slot)
            place_of[e] = line * num_ranks + e.rank
            entries[node] = base + place_of[e]
        base += len(lines) * num_ranks
    within = [sum(depth <= d for depth in tree.depths) for d in range(tree.height + 1)]
    return DraftPlan(tuple(passes), entries, [-1, *(above + 1 for above in tree.parents)], within)


def _blocks(tree_passes: TreePasses, blocks: range, index: int) -> Blocks:
    size = tree_passes.block_size
    # Block 0 rests on true pairs; the others follow one after the other.
    earlier = range(1, blocks.stop)
    offsets = [(tree_passes.pass_of[b] - 1) * size + slot for b in earlier for slot in range(size)]
    seen = torch.tensor(
        [[other in tree_passes.ancestors(b) for other in earlier] for b in blocks if b],
        dtype=torch.bool,
    )
    visible = seen.repeat_interleave(size, 0).repeat_interleave(size, -1) if index else None
    if visible is not None and bool(visible.all()):
        visible = None
    return Blocks(
        blocks.start - 1,
        len(blocks),
        (index - 1) * size,
        torch.tensor(offsets, dtype=torch.long),
        visible,
    )
