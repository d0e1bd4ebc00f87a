"""What all drafters that grow level by level share, with one that reads a table.

Trees, policies, samples and merges in full are in `test_model_drafter.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_spec.drafting.graph import TokenGraph
from hf_spec.drafting.length_policy import LengthPolicy
from hf_spec.drafting.level_drafter import LevelConfig, LevelDrafter
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

    def probabilities(
        self, state: Any, graphs: Mapping[int, TokenGraph], owners: Sequence[tuple[int, int]]
    ) -> Tensor:
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
