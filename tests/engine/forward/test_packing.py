"""Layouts of the new tokens: cache indices, masks, and the absence of padding."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_spec.engine import runner as runner_module
from hf_spec.engine.forward.draft_tree import DraftTree
from hf_spec.engine.forward.output import ForwardOutput
from hf_spec.engine.forward.packing import align_right, pack
from hf_spec.engine.forward.row_batch import RowWork
from hf_spec.engine.runner import ModelRunner
from tests.tiny_models import build

# Row 0: three pending tokens and a fork; row 1 has ended; row 2: a lone root.
TREE = DraftTree.from_rows([([5, 6, 7], [-1, 0, 0]), ([], []), ([8], [-1])])
WORK = [
    RowWork(row=0, stored=2, pending=[1, 2, 3], nodes=[0, 1, 2], offsets=[0, 1, 2], width=3),
    RowWork(row=2, stored=4, pending=[], nodes=[3], offsets=[0], width=1),
]


def test_packed_tokens_follow_each_other_without_padding() -> None:
    inputs = pack(WORK, TREE)
    assert inputs.tokens == [1, 2, 3, 5, 6, 7, 8]
    assert inputs.positions == [2, 3, 4, 5, 6, 6, 4]
    stored = [list(segment.cache_indices) for segment in inputs.segments]
    assert stored == [[2, 3, 4], [5, 6, 7], [4]]
    assert inputs.pending == {0: range(3), 2: range(6, 6)}
    assert inputs.nodes == [3, 4, 5, 6]
    chain, fork, root = inputs.segments
    assert (chain.num_keys, fork.num_keys, root.num_keys) == (5, 8, 5)
    assert chain.visible is not None
    assert chain.visible.sum(dim=1).tolist() == [3, 4, 5]
    assert fork.visible is not None
    assert fork.visible[:, 5:].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]
    assert fork.visible[:, :5].all()
    assert fork.key_position.tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert root.visible is None, "one token sees everything"


def test_rows_that_differ_in_parents_alone_have_masks_of_their_own() -> None:
    tree = DraftTree.from_rows([([5, 6, 7], [-1, 0, 1]), ([5, 6, 7], [-1, 0, 0])])
    work = [
        RowWork(row, stored=2, pending=[], nodes=nodes, offsets=[0, 1, 2], width=3)
        for row, nodes in enumerate(([0, 1, 2], [3, 4, 5]))
    ]
    inputs = pack(work, tree)
    assert inputs.positions == [2, 3, 4, 2, 3, 3]
    last_lines = [segment.visible[-1].int().tolist() for segment in inputs.segments]
    assert last_lines == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 1]]


def test_rectangle_is_aligned_on_the_right_and_pads_to_the_spare_index() -> None:
    inputs = align_right(WORK, TREE, num_rows=3, spare_index=63)
    assert inputs.tokens.tolist() == [[1, 2, 3, 5, 6, 7], [0] * 6, [0, 0, 0, 0, 0, 8]]
    assert inputs.cache_indices[0].tolist() == [2, 3, 4, 5, 6, 7]
    assert inputs.cache_indices[1].tolist() == [63] * 6
    assert inputs.cache_indices[2].tolist() == [63] * 5 + [4]
    assert inputs.visible[1].sum().item() == 6, "padding looks at one key"
    assert inputs.visible[2, -1].int().tolist() == [1, 1, 1, 1, 1, 0, 0, 0]
    assert inputs.visible[0, 4].int().tolist() == [1, 1, 1, 1, 1, 1, 1, 0]
    assert inputs.key_positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6]
    assert inputs.nodes == [3, 4, 5, 17]


def test_position_ids_differ_from_true_positions_by_the_offset() -> None:
    work = [replace(WORK[0], position_offset=-2), WORK[1]]
    plain, moved = pack(WORK, TREE), pack(work, TREE)
    assert moved.positions == [0, 1, 2, 3, 4, 4, 4]
    for before, after in zip(plain.segments, moved.segments, strict=True):
        assert torch.equal(before.position, after.position)
        assert torch.equal(before.key_position, after.key_position)
    line = align_right(work, TREE, num_rows=3, spare_index=63)
    assert line.positions.tolist() == [[0, 1, 2, 3, 4, 4], [0] * 6, [0, 0, 0, 0, 0, 4]]
    assert line.key_positions[0].tolist() == [0, 1, 2, 3, 4, 5, 6, 6]


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_stretches_of_a_prompt_give_the_hidden_states_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(name)
    sequences = [list(range(3, 14)), list(range(20, 24))]
    tree = DraftTree.from_rows([([13, 40], [-1, 0]), ([23], [-1])])

    def run() -> ForwardOutput:
        runner = ModelRunner(model, 2, hidden_layers=(-1,))
        with torch.no_grad(), runner.active():
            return runner.forward(tree, sequences)

    whole = run()
    monkeypatch.setattr(runner_module, "PREFILL_CHUNK", 4)
    monkeypatch.setattr(runner_module, "STEP_TOKENS", 4)
    parts = run()
    torch.testing.assert_close(parts.logits, whole.logits, atol=1e-4, rtol=1e-4)
    assert [len(parts.pending[row]) for row in (0, 1)] == [10, 3]
    for row in (0, 1):
        got, expected = (o.hidden[-1][o.pending[row]] for o in (parts, whole))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(
        parts.hidden[-1][parts.nodes], whole.hidden[-1][whole.nodes], atol=1e-4, rtol=1e-4
    )
