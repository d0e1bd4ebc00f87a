"""What the two lossy sampling rules share: the longest accepted path, and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import TemperatureLogitsWarper
from transformers.generation.stopping_criteria import MaxLengthCriteria

from hf_spec import UnsupportedError
from hf_spec.decoding.state import GenerationState
from hf_spec.decoding.stopping import StopRules
from hf_spec.decoding.verification import Walk
from hf_spec.drafting.longest_path import LongestPath
from hf_spec.execution.tree import DraftTree


class Chosen(LongestPath):
    """Accepts what it is told."""

    nodes: frozenset[int] = frozenset()

    def _accept(self, tree: DraftTree, walk: Walk) -> set[int]:
        return {tree.row_start[row] for row in walk.state.unfinished} | self.nodes


#       0
#     1   2
#    3 4   5
#          6
TREE = DraftTree.from_rows([([9, 1, 2, 3, 4, 5, 6], [-1, 0, 0, 1, 1, 2, 5])])


@pytest.mark.parametrize(
    ("accepted", "path"),
    [
        ([], []),
        ([1], [1]),
        ([1, 2, 5], [2, 5]),
        ([1, 3, 2, 5], [1, 3]),
        ([1, 3, 2, 5, 6], [2, 5, 6]),
    ],
)
def test_the_longest_path_is_kept_and_a_bonus_drawn(accepted: list[int], path: list[int]) -> None:
    prompt = torch.tensor([[8, 9]])
    stop = StopRules([MaxLengthCriteria(30)], 1)
    state = GenerationState.create(prompt, torch.ones_like(prompt), stop, do_sample=True)
    rule = Chosen([TemperatureLogitsWarper(0.5)], 1)
    rule.nodes = frozenset(accepted)
    logits = torch.zeros(7, 12)
    logits[:, 11] = 1000.0
    verdict = rule.verify(TREE, logits, state)
    assert verdict.accepted == [path]
    assert verdict.bonus == [11]


def test_a_processor_that_may_remember_is_refused() -> None:
    def unchanged(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores

    with pytest.raises(UnsupportedError, match="function might remember"):
        Chosen([unchanged], 1)
