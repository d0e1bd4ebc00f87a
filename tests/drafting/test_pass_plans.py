"""Draft passes that the host can plan before any of them runs."""

from __future__ import annotations

import pytest
import torch

from hf_spec.drafting.pass_plans import WIDEST, PassPlans
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.tree_growth import TreeShape

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("shape", "fits"),
    [
        (TreeShape(), True),
        (TreeShape(children=4, expanded_per_level=WIDEST), True),
        (TreeShape(children=4, expanded_per_level=WIDEST + 1), False),
        (TreeShape(children=2, expanded_per_level=256), True),
        (TreeShape(merge_length=1), False),
        (TreeShape(children=2, max_draft_nodes=10), False),
        (TreeShape(children=2, max_draft_nodes=11), True),
        (TreeShape(tree=RankTree.of([(0,), (0, 5), (0, 5, 1)])), True),
    ],
)
def test_which_shapes_are_known_beforehand(shape: TreeShape, fits: bool) -> None:
    assert PassPlans(shape, [], CPU).fit(5) == fits


def test_ranks_beyond_the_vocabulary_are_left_out() -> None:
    shape = TreeShape(tree=RankTree.of([(0,), (0, 5), (0, 5, 1), (0, 1), (0, 1, 0)]))
    assert [plan.width for plan in PassPlans(shape, [], CPU).of(6, 9)] == [1, 1, 2]
    assert [plan.width for plan in PassPlans(shape, [], CPU).of(3, 9)] == [1, 1, 1]
    assert PassPlans(shape, [], CPU).of(6, 9)[2].picks == [1, 5]


def test_rows_leave_where_their_drafts_end() -> None:
    passes = PassPlans(TreeShape(), [], CPU).passes({3: 2, 5: 3, 7: 1}, 1)
    assert [p.rows for p in passes] == [[3, 5, 7], [3, 5], [5]]
    assert [p.depth for p in passes] == [0, 1, 2]
    row_indices = [None if p.row_indices is None else p.row_indices.tolist() for p in passes]
    assert row_indices == [None, [0, 1], [1]]
    assert passes[-1].parents == [-1, 0, 1]


def test_a_pass_of_several_levels() -> None:
    tree = RankTree.of([(0,), (1,), (0, 0), (1, 0), (1, 0, 0), (1, 0, 0, 0), (1, 0, 0, 0, 0)])
    shape = TreeShape(tree=tree, whole=True, levels_per_pass=2)
    passes = PassPlans(shape, [], CPU).passes({0: 5}, 2)
    assert [(p.depth, p.levels, p.plan.width) for p in passes] == [(0, 2, 1), (2, 2, 1), (4, 1, 1)]
    assert passes[1].plan.picks == [1, 2]
    assert [p.chooses for p in passes] == [False] * 3


@pytest.mark.parametrize("ends", [[], [2, 4]])
def test_constants_of_a_tree_whose_nodes_the_device_chooses(ends: list[int]) -> None:
    shape = TreeShape(children=3, expanded_per_level=2)
    plans = PassPlans(shape, ends, CPU)
    passes = plans.passes({0: 3, 1: 2}, 3)
    assert [p.chooses for p in passes] == [False, True, True]
    *before, first, kept, second = (tensor.tolist() for tensor in plans.constants(passes))
    assert before == ([ends] if ends else [])
    # Each node is visible to itself. The second row leaves before the third pass.
    assert (first, kept, second) == ([[1], [2]], [0], [[4], [8]])
    assert plans.constants(plans.passes({0: 1}, 3)) == []
