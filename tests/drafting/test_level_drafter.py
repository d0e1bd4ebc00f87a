"""Shared code of drafters that grow level by level, tested with a drafter that reads a table.

Trees, policies, sampling and merges are tested in full in `methods/draft_model/test_drafter.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_spec import GsdConfig, OptionError, TreeConfig
from hf_spec.drafting.length_policy import ConfidencePolicy, LengthPolicy
from hf_spec.drafting.level_drafter import BeamConfig, LevelConfig, LevelDrafter
from hf_spec.drafting.rank_tree import RankTree
from hf_spec.drafting.tree_growth import Growth, TreeShape
from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from tests.methods.draft_model.test_drafter import start
from tests.tiny_models import ragged_batch

# Next-token probabilities of the four vocabulary entries, and their token ids.
CHANCES = torch.tensor([0.4, 0.3, 0.2, 0.1])
TOKENS = torch.tensor([10, 20, 30, 40])


class OfTable(LevelDrafter):
    def __init__(self, config: LevelConfig, depth: int):
        super().__init__(config, LengthPolicy(depth))
        self.asked: list[list[tuple[int, int]]] = []

    def probabilities(self, state: Any, growth: Growth) -> Tensor:
        self.asked.append(nodes_of(self, growth))
        return CHANCES.repeat(len(growth.owners), 1)

    def token_ids(self, indices: Tensor) -> Tensor:
        return TOKENS[indices]


def nodes_of(drafter: LevelDrafter, growth: Growth) -> list[tuple[int, int]]:
    """Return (row, node) of every node in the next pass."""
    newest = {row: drafter.expanded_nodes[row][-growth.num_nodes(row) :] for row in growth.rows}
    return [(row, node) for row, nodes in newest.items() for node in nodes]


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
    # Reach 0.4, 0.3, 0.16 and 0.12; of two nodes with 0.12, the first is kept.
    assert [tree.tokens[node] for node in tree.nodes(1)][1:] == [10, 20, 10, 20]
    assert [len(owners) for owners in drafter.asked] == [2, 4]


def test_a_tree_of_ranks() -> None:
    """Exactly its nodes are drafted, and only nodes with children are expanded."""
    paths = [(0,), (2,), (2, 1), (2, 3)]

    class Config(LevelConfig):
        shape = TreeShape(tree=RankTree.of(paths))

    tree, drafter = drafted(Config(), 3)
    root, *nodes = tree.nodes(0)
    found = {tree.tokens[node]: tree.tokens[tree.parent[node]] for node in nodes}
    assert found == {10: tree.tokens[root], 30: tree.tokens[root], 20: 30, 40: 30}
    assert [len(owners) for owners in drafter.asked] == [2, 2]
    assert not drafter.samples


class OfBigrams(OfTable):
    """Drafter for the cycle 10, 20, 30, 40, 10; at the root, 10 is likelier than 20."""

    heights: list[int]

    AFTER = (
        (0.05, 0.8, 0.1, 0.05),
        (0.0, 0.1, 0.8, 0.1),
        (0.0, 0.1, 0.1, 0.8),
        (0.8, 0.1, 0.1, 0.0),
    )

    def probabilities(self, state: Any, growth: Growth) -> Tensor:
        owners = nodes_of(self, growth)
        self.asked.append(owners)
        indices = [token // 10 - 1 for token in growth.tokens.tolist()]
        at_root = (0.7, 0.3, 0.0, 0.0)
        lines = [
            self.AFTER[index] if node else at_root
            for index, (_, node) in zip(indices, owners, strict=True)
        ]
        return torch.tensor(lines)


def grown(
    merge_length: int | None,
    depth: int,
    min_probability: float = 0.5,
    threshold: float = 0.0,
    room: int = 20,
) -> OfBigrams:
    config = GsdConfig(
        min_probability=min_probability,
        min_sibling_ratio=0.2,
        merge_length=merge_length,
        max_nodes=50,
    )
    state = start(ragged_batch((5, 3)))
    drafter = OfBigrams(config, depth)
    drafter.policy = ConfidencePolicy(depth, threshold)
    with drafter.active(state):
        tree = drafter.draft(state, dict.fromkeys(state.draft_limits, room))
    drafter.heights = [tree.height(row) for row in (0, 1)]
    return drafter


def test_a_leaf_that_a_likely_token_is_merged_into_grows_on() -> None:
    drafter = grown(0, depth=3)
    # The root, then 10, then 20, which is not a child of 10 but its sibling.
    assert [node for row, node in drafter.asked[2] if row == 0] == [2]
    graph = drafter.graphs[0]
    assert graph.tokens[1:] == [10, 20, 30]
    assert graph.edges[1] == [(2, torch.tensor(0.8).item())]
    # Its reach is that of the path that opened it.
    torch.testing.assert_close(graph.reach[2], 0.7 * 0.8)
    torch.testing.assert_close(graph.reach[3], 0.7 * 0.8 * 0.8)
    # Without merging, 20 is drafted again as a child of 10.
    assert [node for row, node in grown(None, depth=3).asked[2] if row == 0] == [3]


def test_a_policy_judges_a_leaf_by_the_edge_that_opened_it() -> None:
    drafter = grown(0, depth=5, threshold=0.5)
    assert len(drafter.asked) == 5


def test_paths_over_merge_edges_may_be_deeper_than_what_was_drafted() -> None:
    # The levels are 10 and 20, then 30 below 20. The edge 10 -> 20 makes a path of three tokens.
    drafter = grown(0, depth=2, min_probability=0.25)
    assert len(drafter.asked) == 2
    assert max(drafter.graphs[0].depth) == 2
    assert drafter.heights[0] == 3
    # The height never exceeds the available room.
    assert grown(0, depth=2, min_probability=0.25, room=2).heights[0] == 2


def test_a_policy_learns_from_a_tree_that_others_are_part_of() -> None:
    _, drafter = drafted(LevelConfig(), 2)
    told: list[tuple[int, int, int]] = []
    drafter.policy.observe = lambda *heard: told.append(heard)  # type: ignore[method-assign]
    joined = DraftTree.from_rows([([1, 2, 3, 4], [-1, 0, 1, 2]), ([1], [-1])])
    drafter.observe(Verdict(joined, [[1, 2, 3], []], [5, 5]), ForwardOutput(torch.empty(0)))
    assert told == [(0, 3, 3), (1, 0, 0)]


def test_chains_are_drawn_at_random_and_trees_are_not() -> None:
    assert BeamConfig().draws
    assert not BeamConfig(tree="dynamic").draws
    assert BeamConfig(tree="dynamic", sample_drafts=True).draws


def test_shapes_of_beams() -> None:
    assert BeamConfig().shape.children == 1
    shape = BeamConfig(tree="dynamic", width=3, max_nodes=7).shape
    assert (shape.children, shape.expanded_per_level, shape.max_nodes) == (3, 3, 7)


@pytest.mark.parametrize(
    "options", [{"tree": "wide"}, {"width": 0}, {"max_nodes": 0}, {"sample_drafts": 1}]
)
def test_invalid_beams(options: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=next(iter(options))):
        BeamConfig(**options)
