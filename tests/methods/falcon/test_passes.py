"""Index tensors of a tree, against a drafter that looks at whole paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_spec.drafting.rank_tree import Path, RankTree
from hf_spec.methods.falcon.passes import draft_plan
from tests.drafting.test_rank_tree import RAGGED, random_paths


def token(lists_below: tuple[Any, ...], slot: int, rank: int) -> tuple[Any, int, int]:
    """What a made-up head answers: the list is known by the tokens that led to its block."""
    return lists_below, slot, rank


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("seed", range(12))
def test_against_brute_force(seed: int, size: int) -> None:
    """Every node has the token that a drafter would give that follows its path by itself."""
    tree = RankTree.of(random_paths(seed))
    plan = draft_plan(tree, size)
    assert plan.height == tree.height
    assert plan.parents == [-1, *(above + 1 for above in tree.parents)]
    assert plan.within == [sum(d <= depth for d in tree.depths) for depth in range(tree.height + 1)]
    # Of the blocks of a pass what led to them, and its entries; `known` has those of all passes.
    texts: list[tuple[Any, ...]] = [()]
    here: list[tuple[Any, int, int]] = []
    known: list[tuple[Any, int, int]] = []
    for index, step in enumerate(plan.passes):
        if index:
            fed = [here[entry] for entry in step.fed.tolist()]
            above = [texts[parent] for parent in step.parents.tolist()]
            texts = [
                text + tuple(fed[block * size : (block + 1) * size])
                for block, text in enumerate(above)
            ]
            for block, text in enumerate(texts):
                # Of the block that it hangs on, the lists of all depths in order.
                assert [found[:2] for found in text[-size:]] == [
                    (above[block], slot) for slot in range(size)
                ]
        here = [
            token(texts[line // size], line % size, rank)
            for line in step.lines.tolist()
            for rank in range(step.num_ranks)
        ]
        known += here
    for path, entry in zip(tree.paths, plan.entries, strict=True):
        text: tuple[Any, ...] = ()
        block: list[Any] = []
        for rank in path:
            if len(block) == size:
                text, block = text + tuple(block), []
            block.append(token(text, len(block), rank))
        assert known[entry] == block[-1]


def blocks_of(tree: RankTree, size: int, index: int) -> list[Path]:
    """What leads to the blocks of a pass: the nodes at its beginning that have children."""
    return sorted({path[:-1] for path in tree.paths if len(path) == index * size + 1})


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_see_their_ancestors_and_themselves(seed: int, size: int) -> None:
    """Only nodes with children become blocks."""
    tree = RankTree.of(random_paths(seed))
    passes = draft_plan(tree, size).passes
    assert len(passes) == -(-tree.height // size)
    earlier: list[Path] = []
    for index, step in enumerate(passes[1:], start=1):
        mine, blocks = blocks_of(tree, size, index), step.blocks
        assert (blocks.begin, blocks.count) == (len(earlier), len(mine))
        assert blocks.depth == (index - 1) * size
        above = blocks_of(tree, size, index - 1)
        assert [above[parent] for parent in step.parents.tolist()] == [p[:-size] for p in mine]
        earlier += mine
        offsets = [len(path) - size + slot for path in earlier for slot in range(size)]
        assert blocks.offsets.tolist() == offsets
        expected = torch.zeros(len(mine) * size, len(earlier) * size, dtype=torch.bool)
        for row, block in enumerate(mine):
            for column, other in enumerate(earlier):
                if other == block[: len(other)]:
                    rows = slice(row * size, (row + 1) * size)
                    expected[rows, column * size : (column + 1) * size] = True
        visible = torch.ones_like(expected) if blocks.visible is None else blocks.visible
        assert torch.equal(visible, expected)


def test_one_pass_over_parallel_positions() -> None:
    (step,) = draft_plan(RankTree.of(RAGGED), 4).passes
    assert step.lines.tolist() == [0, 1, 2, 3]
    assert step.num_ranks == 8
    assert not len(step.fed)


def test_a_chain_needs_no_mask() -> None:
    plan = draft_plan(RankTree.chain(7), 2)
    assert len(plan.passes) == 4
    assert all(step.blocks.visible is None for step in plan.passes)
    # Depth 8 is not drafted, so its list is not read.
    assert plan.passes[-1].lines.tolist() == [0]


def test_plans_are_made_once() -> None:
    assert draft_plan(RankTree.chain(4), 2) is draft_plan(RankTree.chain(4), 2)
