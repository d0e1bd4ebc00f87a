"""Which tree a head drafts; what is refused end to end stands in `test_falcon`."""

from __future__ import annotations

from typing import Any

import pytest

from hf_spec import AssistantError, OptionError
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.methods.falcon.head import FalconHead, FalconShape
from hf_spec.methods.falcon.tree_choice import choose_tree, max_depth
from tests.falcon_reference import random_head
from tests.tiny_models import build

SIZES = [1, 2, 3, 4]


def head_with(**options: Any) -> FalconHead:
    head = FalconHead(build("llama"), FalconShape(2), None).eval()
    head.options = options
    return head


@pytest.mark.parametrize("size", SIZES)
def test_auto_without_a_stored_tree(size: int) -> None:
    tree = choose_tree("auto", None, random_head("llama", size))
    assert tree.height == 2 * size
    assert set(RankTree.chain(2 * size).paths) < set(tree.paths)
    assert len(tree) <= 2 * size + 3


def test_chains_are_as_deep_as_asked_or_two_passes() -> None:
    assert choose_tree("chain", None, random_head("llama", 3)) == RankTree.chain(6)
    assert choose_tree("chain", 5, random_head("llama", 2)) == RankTree.chain(5)
    assert choose_tree("chain", None, head_with(max_depth=3)) == RankTree.chain(3)


def test_trees_are_cut() -> None:
    own = head_with(tree=[[0], [0, 0], [1], [0, 0, 0]])
    assert choose_tree("auto", 2, own).paths == ((0,), (1,), (0, 0))
    assert choose_tree("falcon-vicuna", 1, random_head("llama")).height == 1


def test_what_is_refused() -> None:
    assert max_depth(head_with()) is None
    with pytest.raises(AssistantError, match="max_depth='6'"):
        max_depth(head_with(max_depth="6"))
    with pytest.raises(AssistantError, match="tree cannot be used"):
        choose_tree("auto", None, head_with(tree="chain"))
    with pytest.raises(OptionError, match=r"depth 4 .* trained for \(3\)"):
        choose_tree(RankTree.chain(4).paths, None, head_with(max_depth=3))
    with pytest.raises(OptionError, match="block_size 2; this one has 3"):
        choose_tree("falcon-llama", None, random_head("llama", 3))
