"""True pairs: which states of a forward become a row's features."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_spec.engine.forward.draft_tree import DraftTree, Verdict
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.methods.feature_pairs.rows import PairRows


class LastState:
    hidden_layers = (-1,)

    def fuse(self, states: Sequence[Tensor]) -> Tensor:
        return states[0]


def test_the_root_and_what_was_accepted() -> None:
    rows = PairRows(3, 1, torch.device("cpu"))
    states = torch.arange(10.0)[:, None]
    tree = DraftTree.from_drafts({0: ([5, 6, 7], [-1, 0, 0]), 2: ([8, 9], [-1, 0])}, 3)
    output = ForwardOutput(torch.empty(0), {-1: states}, {0: [0, 1]}, [2, 3, 4, 5, 6])
    rows.root_positions = [2, 0, 4]
    verdict = Verdict(tree, [[2], [], []], [1, None, 1])
    rows.learn(verdict, output, LastState())
    assert [row.num_pairs for row in rows.rows] == [4, 0, 1]
    assert rows.rows[0].features.flatten().tolist() == [0, 1, 2, 4]
    assert rows.rows[2].features.flatten().tolist() == [5]
    # The second text began in a reused cache.
    assert (rows.rows[0].first, rows.rows[2].first) == (0, 4)
    assert rows.rows[0].slice(2, 4).flatten().tolist() == [2, 4]
    rows.restart(0)
    assert rows.rows[0].num_pairs == 0
    assert rows.rows[0].first < 0
