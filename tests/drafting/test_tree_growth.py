"""Nodes of a growing draft; complete drafts are tested in `test_level_drafter.py`."""

from __future__ import annotations

import torch

from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.drafting.tree_growth import NextLists, RowGrowth, TreeShape

END = 9


def grown(shape: TreeShape, drawn: bool = False) -> RowGrowth:
    """Return a root with the children 5, 6, 7 and END."""
    growth = RowGrowth(TokenGraph([1]), shape, END.__eq__, drawn=drawn)
    assert growth.begin_pass() == [0]
    growth.add_levels([0], NextLists([[[5, 6, 7, END]]], [[[0.4, 0.3, 0.2, 0.1]]]))
    return growth


def test_the_likeliest_are_drafted_on() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=2))
    assert growth.graph.tokens == [1, 5, 6, 7, END]
    assert growth.last_level == [1, 2, 3, 4]
    assert list(growth.frontier) == [1, 2]
    assert growth.begin_pass() == [1, 2]
    assert growth.expanded_nodes == [0, 1, 2]
    assert growth.last_level == []


def test_the_likeliest_paths_are_drafted_on_and_not_the_likeliest_tokens() -> None:
    growth = RowGrowth(TokenGraph([1]), TreeShape(children=2, expanded_per_level=2), END.__eq__)
    growth.add_levels(growth.begin_pass(), NextLists([[[5, 6]]], [[[0.6, 0.4]]]))
    lists = NextLists([[[5, 6]], [[7, 8]]], [[[0.5, 0.45]], [[0.6, 0.1]]])
    growth.add_levels(growth.begin_pass(), lists)
    # 0.6 * 0.45 is larger than 0.4 * 0.6.
    assert list(growth.frontier) == [3, 4]


def test_nothing_follows_an_end() -> None:
    assert list(grown(TreeShape(children=4, expanded_per_level=9)).frontier) == [1, 2, 3]


def test_what_ran_for_nothing_has_no_children() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=2))
    assert growth.begin_pass([None, 2, 3, 1]) == [-1, 2, -1, 1]
    lists = NextLists([[[5, 6]]] * 2, [[[0.5, 0.5]]] * 2)
    growth.add_levels([-1, 2], lists)
    assert growth.last_level == [None, None, 5, 6]
    assert growth.expanded_nodes == [0, -1, 2, -1, 1]


def test_unlikely_children() -> None:
    shape = TreeShape(children=4, expanded_per_level=4, min_probability=0.3, min_sibling_ratio=0.5)
    growth = grown(shape)
    # 0.2 is half of 0.4, but below 0.3.
    assert growth.last_level == [1, 2, 3, None]
    assert list(growth.frontier) == [1, 2]


def test_as_many_nodes_as_may_be_drafted() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=4, max_draft_nodes=2))
    assert growth.last_level == [1, 2, None, None]
    assert not growth.frontier


def test_drawn_children_are_sent_by_count_alone() -> None:
    shape = TreeShape(children=4, max_nodes=3)
    assert grown(shape, drawn=True).last_level == [None] * 4
    shape = TreeShape(children=4, min_sibling_ratio=0.5)
    assert grown(shape, drawn=True).last_level == [1, 2, 3, 4]
    growth = RowGrowth(TokenGraph([1]), TreeShape(), END.__eq__, drawn=True)
    growth.begin_pass()
    probs = torch.ones(1, 3) / 3
    growth.add_levels([0], NextLists([[[5]]], [[[1 / 3]]], probs, [[0.25]]))
    assert torch.equal(growth.distributions.pop(0), probs[0])
    assert not growth.distributions
    assert growth.scores == {0: 0.25}


def test_ranks() -> None:
    growth = grown(TreeShape(tree=RankTree.of([(0,), (2,), (2, 1)])))
    assert growth.last_level == [1, None, 2, None]
    assert list(growth.frontier) == [2]


WHOLE = TreeShape(
    tree=RankTree.of([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0)]), whole=True, levels_per_pass=2
)


def test_two_levels_a_pass() -> None:
    """Second-level nodes take their tokens from the list of the node that ran."""
    growth = RowGrowth(TokenGraph([1]), WHOLE, END.__eq__)
    nodes = growth.begin_pass()
    lists = NextLists([[[5, 6], [7, END]]], [[[0.4, 0.3], [0.2, 0.0]]])
    growth.add_levels(nodes, lists)
    # A whole tree keeps end tokens and tokens with zero probability.
    assert growth.graph.tokens == [1, 5, 6, 7, END, 7]
    assert growth.graph.parents == [-1, 0, 0, 1, 1, 2]
    assert growth.begin_pass() == [4]
    assert (growth.pass_parent(4), growth.pass_tokens(4)) == (0, [5, END])
    assert growth.expanded_subtree() == ([1, END], [-1, 0])


def test_a_pass_may_be_cut() -> None:
    growth = RowGrowth(TokenGraph([1]), WHOLE, END.__eq__, max_levels=1)
    lists = NextLists([[[5, 6], [7, END]]], [[[0.4, 0.3], [0.2, 0.1]]])
    growth.add_levels(growth.begin_pass(), lists)
    assert growth.graph.tokens == [1, 5, 6]
