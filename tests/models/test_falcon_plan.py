"""Index tensors of a tree: they pick what the compiler of rank trees says."""

from __future__ import annotations

import pytest
import torch

from hf_spec.drafting.rank_tree import RankTree
from hf_spec.models.falcon_plan import draft_plan
from tests.drafting.test_rank_tree import random_paths


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(8))
def test_plans_pick_the_compiled_entries(seed: int, size: int) -> None:
    tree = RankTree.of(random_paths(seed))
    compiled, plan = tree.passes(size), draft_plan(tree, size)
    assert plan.height == tree.height
    assert plan.parents == [-1, *(above + 1 for above in tree.parents)]
    assert plan.within == [sum(d <= depth for d in tree.depths) for depth in range(tree.height + 1)]
    # Which (block, slot, rank) each entry stands for, over all passes.
    meaning: list[tuple[int, int, int]] = []
    before: list[tuple[int, int, int]] = []
    for index, step in enumerate(plan.passes):
        first = compiled.blocks(index).start
        here = [
            (first + line // size, line % size, rank)
            for line in step.host_lines
            for rank in range(step.num_ranks)
        ]
        if index:
            above = compiled.blocks(index - 1).start
            fed = [before[entry] for entry in step.fed.tolist()]
            assert fed == [
                (e.block, e.slot, e.rank)
                for block in compiled.blocks(index)
                for e in (compiled.entries[node] for node in compiled.nodes[block])
            ]
            parents = [compiled.parent[block] - above for block in compiled.blocks(index)]
            assert step.host_parents == parents
        meaning += here
        before = here
    entries = [(e.block, e.slot, e.rank) for e in compiled.entries]
    assert [meaning[entry] for entry in plan.entries] == entries


@pytest.mark.parametrize("size", [1, 2, 3])
def test_blocks_see_their_ancestors_and_themselves(size: int) -> None:
    tree = RankTree.of(random_paths(3))
    compiled = tree.passes(size)
    for index, step in enumerate(draft_plan(tree, size).passes[1:], start=1):
        mine, blocks = compiled.blocks(index), step.blocks
        assert (blocks.begin, blocks.count) == (mine.start - 1, len(mine))
        assert blocks.depth == (index - 1) * size
        assert blocks.offsets[-len(mine) * size :].tolist() == len(mine) * [
            blocks.depth + slot for slot in range(size)
        ]
        expected = torch.zeros(len(mine) * size, (mine.stop - 1) * size, dtype=torch.bool)
        for row, block in enumerate(mine):
            for other in compiled.ancestors(block):
                rows = slice(row * size, (row + 1) * size)
                expected[rows, (other - 1) * size : other * size] = True
        visible = torch.ones_like(expected) if blocks.visible is None else blocks.visible
        assert torch.equal(visible, expected)


def test_a_chain_needs_no_mask() -> None:
    plan = draft_plan(RankTree.chain(7), 2)
    assert len(plan.passes) == 4
    assert all(step.blocks.visible is None for step in plan.passes)
    # Depth 8 is not drafted, so its list is not read.
    assert plan.passes[-1].host_lines == [0]


def test_plans_are_made_once() -> None:
    assert draft_plan(RankTree.chain(4), 2) is draft_plan(RankTree.chain(4), 2)
