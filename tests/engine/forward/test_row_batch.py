"""Tokens that a row contributes to a forward pass: their cache indices and positions."""

from __future__ import annotations

from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.row_batch import RowWork

TREE = DraftTree.from_rows([([5, 6, 7], [-1, 0, 0]), ([], []), ([8], [-1])])
FORK = RowWork(0, stored=2, pending=[1, 2], nodes=[0, 1, 2], offsets=[0, 1, 2], width=3)


def test_cache_indices_are_positions_of_the_first_tokens() -> None:
    assert (FORK.root_position, FORK.root_index, FORK.num_keys) == (4, 4, 7)
    assert FORK.cache_indices == [2, 3, 4, 5, 6]
    assert FORK.positions(TREE) == [2, 3, 4, 5, 5]
    assert FORK.key_positions().tolist() == [0, 1, 2, 3]
