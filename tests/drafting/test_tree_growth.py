"""What hangs where in a draft under construction; whole drafts are in `test_level_drafter.py`."""

from __future__ import annotations

import torch

from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.token_graph import TokenGraph
from hf_spec.drafting.tree_growth import Growth, TreeShape

END = 9


def grown(shape: TreeShape, drawn: bool = False) -> Growth:
    """A root whose children are the tokens 5, 6, 7 and the end."""
    growth = Growth(TokenGraph([1]), shape, drawn)
    assert growth.begin_level() == [0]
    growth.expand(0, [5, 6, 7, END], [0.4, 0.3, 0.2, 0.1])
    growth.narrow(END.__eq__)
    return growth


def test_the_likeliest_are_drafted_on() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=2))
    assert growth.graph.tokens == [1, 5, 6, 7, END]
    assert growth.newest == [1, 2, 3, 4]
    assert list(growth.frontier) == [1, 2]
    assert growth.begin_level() == [1, 2]
    assert growth.ran == [0, 1, 2]
    assert growth.newest == []


def test_nothing_follows_an_end() -> None:
    assert list(grown(TreeShape(children=4, expanded_per_level=9)).frontier) == [1, 2, 3]


def test_what_ran_for_nothing_has_no_children() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=2))
    assert growth.begin_level([None, 2, 3, 1]) == [-1, 2, -1, 1]
    for node in (-1, 2):
        growth.expand(node, [5, 6], [0.5, 0.5])
    assert growth.newest == [None, None, 5, 6]
    assert growth.ran == [0, -1, 2, -1, 1]


def test_unlikely_children() -> None:
    shape = TreeShape(children=4, expanded_per_level=4, min_probability=0.3, min_sibling_ratio=0.5)
    growth = grown(shape)
    # 0.2 is as much as half of 0.4, but less than 0.3.
    assert growth.newest == [1, 2, 3, None]
    assert list(growth.frontier) == [1, 2]


def test_as_many_nodes_as_may_be_drafted() -> None:
    growth = grown(TreeShape(children=4, expanded_per_level=4, max_draft_nodes=2))
    assert growth.newest == [1, 2, None, None]
    assert not growth.frontier


def test_drawn_children_are_sent_by_count_alone() -> None:
    shape = TreeShape(children=4, max_nodes=3)
    assert grown(shape, drawn=True).newest == [None] * 4
    growth = Growth(TokenGraph([1]), TreeShape(), drawn=True)
    growth.begin_level()
    probs = torch.ones(3) / 3
    growth.expand(0, [5], [1 / 3], probs, score=0.25)
    assert growth.distributions == {0: probs}
    assert growth.scores == {0: 0.25}


def test_ranks() -> None:
    growth = grown(TreeShape(tree=RankTree.of([(0,), (2,), (2, 1)])))
    assert growth.newest == [1, None, 2, None]
    assert list(growth.frontier) == [2]
