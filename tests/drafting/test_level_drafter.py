"""What all drafters that grow level by level share, with one that reads a table.

Trees, policies, samples and merges in full are in `test_model_drafter.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import Graphs, LevelConfig, LevelDrafter, Owners, TreeShape
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.execution.runner import ForwardOutput
from hf_spec.execution.tree import DraftTree, Verdict
from hf_spec.strategies import TreeConfig
from tests.drafting.test_model_drafter import start
from tests.tiny_models import ragged_batch

# Of four places, which stand for tokens 10, 20, 30 and 40: what follows the token before.
CHANCES = torch.tensor([0.4, 0.3, 0.2, 0.1])
TOKENS = torch.tensor([10, 20, 30, 40])


class OfTable(LevelDrafter):
    def __init__(self, config: LevelConfig, depth: int):
        super().__init__(config, LengthPolicy(depth))
        self.asked: list[list[tuple[int, int]]] = []

    def probabilities(self, state: Any, graphs: Graphs, owners: Owners) -> Tensor:
        self.asked.append(list(owners))
        return CHANCES.repeat(len(owners), 1)

    def token_ids(self, places: Tensor) -> Tensor:
        return TOKENS[places]


def drafted(config: LevelConfig, depth: int) -> tuple[Any, OfTable]:
    state = start(ragged_batch((5, 3)))
    drafter = OfTable(config, depth)
    with drafter.active(state):
        return drafter.draft(state, state.draft_limits), drafter


def test_places_become_tokens() -> None:
    tree, drafter = drafted(LevelConfig(), 3)
    assert [tree.tokens[node] for node in tree.nodes(0)][1:] == [10, 10, 10]
    assert tree.node_probs is not None
    assert tree.node_probs[1:4] == [CHANCES[0].item()] * 3
    assert [len(owners) for owners in drafter.asked] == [2, 2, 2]
    assert drafter.counters["draft_nodes"] == 6


def test_a_beam_and_the_likeliest_of_all() -> None:
    config = TreeConfig(children=2, expanded_per_level=2, max_nodes=4)
    tree, drafter = drafted(config, 2)
    # 0.4, 0.3, 0.16 and 0.12, the first of two equal ones.
    assert [tree.tokens[node] for node in tree.nodes(1)][1:] == [10, 20, 10, 20]
    assert [len(owners) for owners in drafter.asked] == [2, 4]


def test_a_tree_of_ranks() -> None:
    """Its nodes and no others, and only those with children are asked about."""
    paths = [(0,), (2,), (2, 1), (2, 3)]

    class Config(LevelConfig):
        shape = TreeShape(tree=RankTree.of(paths))

    tree, drafter = drafted(Config(), 3)
    root, *nodes = tree.nodes(0)
    found = {tree.tokens[node]: tree.tokens[tree.parent[node]] for node in nodes}
    assert found == {10: tree.tokens[root], 30: tree.tokens[root], 20: 30, 40: 30}
    assert [len(owners) for owners in drafter.asked] == [2, 2]
    assert not drafter.samples


def test_a_policy_learns_from_a_tree_that_others_are_part_of() -> None:
    _, drafter = drafted(LevelConfig(), 2)
    told: list[tuple[int, int, int]] = []
    drafter.policy.observe = lambda *heard: told.append(heard)  # type: ignore[method-assign]
    joined = DraftTree.from_rows([([1, 2, 3, 4], [-1, 0, 1, 2]), ([1], [-1])])
    drafter.observe(Verdict(joined, [[1, 2, 3], []], [5, 5]), ForwardOutput(torch.empty(0)))
    assert told == [(0, 3, 3), (1, 0, 0)]
